"""The process of jail.py, and how a program is run in it."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import math
import os
import secrets
import select
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from hybridflow.core.errors import HybridFlowError
from hybridflow.core.validators import at_least, positive

JAIL = Path(__file__).with_name("jail.py")
"""The script that isolates a program."""
REFUSED = 125
"""Exit status of JAIL where it could not isolate itself, and ran nothing."""
NEEDED = (
    "a sandbox needs Linux namespaces (run as root, or allow user namespaces: sysctl "
    "kernel.unprivileged_userns_clone=1, user.max_user_namespaces; in Docker --cap-add SYS_ADMIN) "
    "and libseccomp (apt install libseccomp2)"
)
MOST_IDLE = 32
"""Largest number of processes that wait for their next program."""


@attrs.frozen
class Limits:
    """The limits of one program."""

    seconds: float = attrs.field(default=5.0, validator=positive)
    """Wall time. The CPU time is limited to as much, rounded up to seconds."""
    memory_mb: int = attrs.field(default=256, validator=at_least(32))
    """Address space of each process, in MB (10^6 bytes), and what all of them hold together, which
    is looked at 20 times a second; memory that two of them share counts twice."""
    disk_mb: int = attrs.field(default=8, validator=at_least(1))
    """Size of all files that the program writes, in MB (10^6 bytes); at most 4,096 files."""
    processes: int = attrs.field(default=8, validator=at_least(1))
    """Largest number of processes and threads at a time."""
    output_bytes: int = attrs.field(default=65_536, validator=at_least(1))
    """Largest size of standard output, and of standard error. A program that writes more is
    ended."""


@attrs.frozen
class ProgramOutcome:
    """How a program ended, and what it wrote."""

    reason: str
    """Why it ended: "ended" (by itself), "time" or "output" (at that limit)."""
    status: int
    """Exit status; 128 + n if signal n ended it."""
    output: str
    """Its standard output, up to the limit."""
    errors: str
    """Its standard error, up to the limit."""

    @property
    def good(self) -> bool:
        """Whether the program ended by itself, with status 0."""
        return self.reason == "ended" and self.status == 0


class SandboxError(HybridFlowError):
    """This machine does not let a program run apart from it, or a sandbox has ended."""


class Jail:
    """A process of jail.py, which runs one program at a time."""

    def __init__(self) -> None:
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [_python(), "-I", "-S", str(JAIL)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={},
                cwd="/",
                start_new_session=True,
            )
        self._place: dict[str, Any] = {}
        """Settings of jail.py that the programs of a place have in common."""

    def begin(self, folders: Mapping[str, str], door: bool) -> None:
        """Begin a new place: see Sandbox. The next program makes it."""
        self._place = {
            "prefix": os.path.realpath(sys.base_prefix),
            "folders": dict(folders),
            "door": door,
            # A user that is not used otherwise: the kernel counts processes by user.
            "uid": 200_000 + secrets.randbelow(2**30),
        }

    def end(self) -> None:
        """End a place, its files and its door. Raises OSError where the jail has ended."""
        self.channel.send(b"end")

    def stop(self) -> None:
        """End the process, and the program that another thread has it run; close() follows."""
        with contextlib.suppress(OSError):
            self.channel.shutdown(socket.SHUT_RDWR)
        self.process.wait()

    def close(self) -> None:
        """End the process; safe to call twice."""
        self.stop()
        self.channel.close()

    def run(
        self, program: Mapping[str, Any], given: str | bytes, limits: Limits
    ) -> tuple[ProgramOutcome, socket.socket | None]:
        """Run a program; return how it ended, and with a place's first one its door.

        program: settings of jail.py. Raises SandboxError where this machine cannot isolate it,
        and OSError where the jail has ended.
        """
        settings = {
            **self._place,
            **program,
            "cpu_s": math.ceil(limits.seconds),
            "memory_bytes": limits.memory_mb * 10**6,
            "disk_bytes": limits.disk_mb * 10**6,
            "processes": limits.processes,
        }
        deadline = time.monotonic() + limits.seconds
        output, their_output = os.pipe()
        errors, their_errors = os.pipe()
        with open(output, "rb", buffering=0) as out, open(errors, "rb", buffering=0) as err:
            sent = [_file(json.dumps(settings)), _file(given), their_output, their_errors]
            try:
                socket.send_fds(self.channel, [b"%d" % (limits.memory_mb * 10**6)], sent)
            finally:
                for descriptor in sent:
                    os.close(descriptor)

            reason, texts = _read(out.fileno(), err.fileno(), deadline, limits)
            # A program may close its streams and continue to run.
            if reason == "ended" and not self._ended(max(deadline - time.monotonic(), 0.1)):
                reason = "time"
            if reason != "ended":
                self.channel.send(b"kill")
            status, doors, _, _ = socket.recv_fds(self.channel, 16, 1)
        if not status:
            raise OSError("the sandbox's own process was ended")
        # A program may exit with this status too, but jail.py changes it then.
        if status[0] == REFUSED and texts[1].startswith("cannot isolate"):
            why = texts[1].strip()
            raise SandboxError(
                f"this machine does not let a program run apart from it ({why}); {NEEDED}"
            )
        door = socket.socket(fileno=doors[0]) if doors else None
        return ProgramOutcome(reason, status[0], *texts), door

    def _ended(self, wait_s: float) -> bool:
        """Return whether the program ends within `wait_s` seconds."""
        # Not select, which refuses descriptors above 1,023.
        poll = select.poll()
        poll.register(self.channel, select.POLLIN)
        return bool(poll.poll(wait_s * 1000))


_idle: list[Jail] = []
"""Jails that run nothing now."""
os.register_at_fork(after_in_child=_idle.clear)


def take() -> Jail:
    """Return a jail, an idle one if there is one."""
    try:
        return _idle.pop()
    except IndexError:
        return Jail()


def give_back(jail: Jail) -> None:
    """Have a jail wait for its next program; its place is ended."""
    try:
        jail.end()
    except OSError:  # it was killed
        jail.close()
        return
    _idle.append(jail)
    if len(_idle) > MOST_IDLE:
        _idle.pop(0).close()


@contextlib.contextmanager
def lent() -> Iterator[Jail]:
    """Lend a jail for a program alone. It is closed when its use fails."""
    jail = take()
    try:
        yield jail
    except BaseException:
        jail.close()
        raise
    give_back(jail)


@atexit.register
def close_idle() -> None:
    """End all jails that run nothing."""
    while _idle:
        _idle.pop().close()


def _file(content: str | bytes) -> int:
    """Return a file in memory, which nobody can write to any more."""
    descriptor = os.memfd_create("given", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        left = content.encode(errors="replace") if isinstance(content, str) else content
        while left:
            left = left[os.write(descriptor, left) :]
        os.lseek(descriptor, 0, os.SEEK_SET)
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _python() -> str:
    """Return the interpreter, or the one that this virtual environment was made from."""
    if sys.prefix == sys.base_prefix:
        return os.path.realpath(sys.executable)
    executable = getattr(sys, "_base_executable", "")
    if not executable:
        name = f"python{sys.version_info.major}.{sys.version_info.minor}"
        executable = os.path.join(sys.base_prefix, "bin", name)
    return os.path.realpath(executable)


def _read(out: int, err: int, deadline: float, limits: Limits) -> tuple[str, list[str]]:
    """Read both streams until they are closed, or until a limit is reached.

    deadline: by time.monotonic. Returns the reason, as ProgramOutcome has it, and both texts.
    """
    contents: dict[int, bytes] = {out: b"", err: b""}
    with selectors.DefaultSelector() as selector:
        for stream in contents:
            os.set_blocking(stream, False)
            selector.register(stream, selectors.EVENT_READ)

        reason = "ended"
        while selector.get_map():
            left = deadline - time.monotonic()
            ready = selector.select(left) if left > 0 else []
            if not ready and time.monotonic() >= deadline:
                reason = "time"
                break

            for key, _ in ready:
                piece = os.read(key.fd, 65_536)
                if not piece:
                    selector.unregister(key.fd)
                contents[key.fd] += piece
            if max(map(len, contents.values())) > limits.output_bytes:
                reason = "output"
                break
    kept = [value[: limits.output_bytes] for value in contents.values()]
    return reason, [value.decode(errors="replace") for value in kept]
