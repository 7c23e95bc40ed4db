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
import threading
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
        try:
            with theirs:
                self.pid = _started(theirs)
        except BaseException:
            self.channel.close()
            raise
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
            self.channel.shutdown(socket.SHUT_WR)
            while self.channel.recv(16):
                pass

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
        place = json.dumps({**self._place, "disk_bytes": limits.disk_mb * 10**6})
        settings = json.dumps(
            {
                **program,
                "cpu_s": math.ceil(limits.seconds),
                "memory_bytes": limits.memory_mb * 10**6,
                "processes": limits.processes,
            }
        )
        deadline = time.monotonic() + limits.seconds
        with contextlib.ExitStack() as ours:
            with contextlib.ExitStack() as theirs:
                sent = [_file(text, theirs) for text in (place, settings, given)]
                out, err = (_pipe(ours, theirs, sent) for _ in range(2))
                socket.send_fds(self.channel, [b"%d" % (limits.memory_mb * 10**6)], sent)

            reason, texts = _read(out, err, deadline, limits)
            # A program may close its streams and continue to run.
            if reason == "ended" and not self._answers(max(deadline - time.monotonic(), 0.1)):
                reason = "time"
            if reason != "ended":
                self.channel.send(b"kill")
            status, doors, _, _ = socket.recv_fds(self.channel, 16, 1)
        door = None
        if doors:
            door = socket.socket(fileno=doors[0])
            door.set_inheritable(False)
        # A program may exit with this status too, but jail.py changes it then.
        refused = status[:1] == bytes([REFUSED]) and texts[1].startswith("cannot isolate")
        if door is not None and (refused or not status):
            door.close()
        if not status:
            raise OSError("the sandbox's own process was ended")
        if refused:
            why = texts[1].strip()
            raise SandboxError(
                f"this machine does not let a program run apart from it ({why}); {NEEDED}"
            )
        return ProgramOutcome(reason, status[0], *texts), door

    @property
    def lives(self) -> bool:
        """Whether it waits for its next program."""
        return not self._answers(0.0)

    def _answers(self, wait_s: float) -> bool:
        """Return whether it says something, or ends, within `wait_s` seconds."""
        # Not select, which refuses descriptors above 1,023.
        poll = select.poll()
        poll.register(self.channel, select.POLLIN)
        return bool(poll.poll(wait_s * 1000))


class _Starter:
    """The process of jail.py that starts the others, by a fork for each."""

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

    def start(self, theirs: socket.socket) -> int:
        """Start a process that serves at a socket; return its number.

        Raises ConnectionError where this one has ended, else OSError.
        """
        socket.send_fds(self.channel, [b"serve"], [theirs.fileno()])
        started = self.channel.recv(16)
        if not started:
            raise ConnectionError("the process that starts sandboxes has ended")
        if int(started) < 0:
            raise OSError("this machine lets no more processes start")
        return int(started)

    def close(self) -> None:
        """End it, and the processes that it has started."""
        self.channel.close()
        self.process.wait()


_starter: _Starter | None = None
_starting = threading.Lock()
_idle: list[Jail] = []
"""Jails that run nothing now."""


def _started(theirs: socket.socket) -> int:
    """Start a process that serves at a socket; return its number. Raises OSError."""
    global _starter
    with _starting:
        if _starter is None:
            _starter = _Starter()
        try:
            return _starter.start(theirs)
        except ConnectionError:  # it was killed; the next one has another
            _starter.close()
            _starter = None
            raise


def _forget() -> None:
    """Leave to a parent process what is its own."""
    global _starter, _starting
    _starter, _starting = None, threading.Lock()
    _idle.clear()


os.register_at_fork(after_in_child=_forget)


def take() -> Jail:
    """Return a jail, an idle one if there is one. Raises SandboxError."""
    with contextlib.suppress(IndexError):
        while True:
            jail = _idle.pop()
            if jail.lives:
                return jail
            jail.close()
    try:
        return Jail()
    except OSError as error:
        raise SandboxError(f"no sandbox can be started: {error}") from error


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
    """Lend a jail for a program alone. It is closed when its use fails. Raises SandboxError."""
    jail = take()
    try:
        yield jail
    except BaseException as error:
        jail.close()
        if isinstance(error, OSError):
            raise SandboxError(f"a sandbox has ended: {error}") from error
        raise
    give_back(jail)


@atexit.register
def close_idle() -> None:
    """End all jails that run nothing, and with the process that has started them the others."""
    global _starter
    while _idle:
        _idle.pop().close()
    with _starting:
        if _starter is not None:
            _starter.close()
            _starter = None


def _file(content: str | bytes, closed_by: contextlib.ExitStack) -> int:
    """Return a file in memory, which nobody can write to any more."""
    descriptor = os.memfd_create("given", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    closed_by.callback(os.close, descriptor)
    left = memoryview(content.encode(errors="replace") if isinstance(content, str) else content)
    while left:
        left = left[os.write(descriptor, left) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def _pipe(ours: contextlib.ExitStack, theirs: contextlib.ExitStack, sent: list[int]) -> int:
    """Make a pipe, and put its end for writing to what is sent; return that for reading."""
    reader, writer = os.pipe()
    ours.callback(os.close, reader)
    theirs.callback(os.close, writer)
    sent.append(writer)
    return reader


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
    contents = {out: bytearray(), err: bytearray()}
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
    kept = [bytes(value[: limits.output_bytes]) for value in contents.values()]
    return reason, [value.decode(errors="replace") for value in kept]
