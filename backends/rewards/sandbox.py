"""Runs programs that a model wrote, isolated from this machine.

They have limits of time, memory, files and processes, no network, and no access to our files:

    run_program -- settings, stdout, stderr --> jail.py    kept, and used again
         ^                                       `- isolated    new namespaces
         |                                           `- supervise   process 1 of them; an own root
         `-- output, errors, exit status                 `- program limits, no privileges

It needs Linux: namespaces (as root, or by user namespaces), a filter of system calls by libseccomp,
and a root directory that holds Python's standard library, read-only, and a small tmpfs. A bug in
the kernel could still let a program escape: docs/security.md says what holds one back.
"""

from __future__ import annotations

import atexit
import contextlib
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
from collections.abc import Iterator
from pathlib import Path

import attrs

from hybridflow.core.errors import RewardError
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


def run_program(
    program: str, given: str | None = None, limits: Limits | None = None
) -> ProgramOutcome:
    """Run Python text with `given` as its standard input (None: empty).

    Raises RewardError where this machine cannot isolate the program.
    """
    limits = limits or Limits()
    python = os.path.realpath(sys.executable) if sys.prefix == sys.base_prefix else _base_python()
    settings = _jail_settings(program, given, limits)
    with _jail(python) as jail:
        reason, status, output, errors = jail.run(settings, limits)

    # A program may exit with this status too, but jail.py changes it then.
    if status == REFUSED and errors.startswith("cannot isolate"):
        raise RewardError(
            f"this machine does not let a program run apart from it ({errors.strip()}); {NEEDED}"
        )
    return ProgramOutcome(reason, status, output, errors)


def diagnose() -> list[tuple[str, str, str]]:
    """Say for `hybridflow doctor` whether programs can run here: subject, finding, remedy."""
    if sys.platform != "linux":
        return [("sandbox", f"programs cannot run on {sys.platform}", "use Linux for them")]
    try:
        run_program("pass")
    except RewardError as error:
        found, _, remedy = str(error).partition("; ")
        return [("sandbox", found, remedy)]
    return [("sandbox", "programs run isolated: namespaces, and a filter of system calls", "")]


_idle: list[_Jail] = []
"""Jails that run nothing now."""
os.register_at_fork(after_in_child=_idle.clear)


@contextlib.contextmanager
def _jail(python: str) -> Iterator[_Jail]:
    """Lend a jail, an idle one if there is one. It is closed when its use fails."""
    try:
        jail = _idle.pop()
    except IndexError:
        jail = _Jail(python)
    try:
        yield jail
    except BaseException:
        jail.close()
        raise
    _idle.append(jail)
    if len(_idle) > (os.cpu_count() or 1):
        _idle.pop(0).close()


@atexit.register
def _close_idle() -> None:
    while _idle:
        _idle.pop().close()


class _Jail:
    """A process of jail.py, which runs one program at a time."""

    def __init__(self, python: str):
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [python, "-I", "-S", str(JAIL)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={},
                cwd="/",
                start_new_session=True,
            )

    def close(self) -> None:
        """End the process, and the program that it runs."""
        self.channel.close()
        self.process.wait()

    def run(self, settings: bytes, limits: Limits) -> tuple[str, int, str, str]:
        """Run a program; return (reason, exit status, output, errors), as ProgramOutcome has them.

        settings: of jail.py. Raises OSError where the jail has ended.
        """
        deadline = time.monotonic() + limits.seconds
        output, their_output = os.pipe()
        errors, their_errors = os.pipe()
        given = os.memfd_create("settings")
        sent = [given, their_output, their_errors]
        with open(output, "rb", buffering=0) as out, open(errors, "rb", buffering=0) as err:
            try:
                _write_all(given, settings)
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
            status = self.channel.recv(16)
        if not status:
            raise OSError("the sandbox's own process was ended")
        return reason, status[0], texts[0], texts[1]

    def _ended(self, wait_s: float) -> bool:
        """Return whether the program ends within `wait_s` seconds."""
        # Not select, which refuses descriptors above 1,023.
        poll = select.poll()
        poll.register(self.channel, select.POLLIN)
        return bool(poll.poll(wait_s * 1000))


def _write_all(descriptor: int, content: bytes) -> None:
    while content:
        content = content[os.write(descriptor, content) :]


def _jail_settings(program: str, given: str | None, limits: Limits) -> bytes:
    """Return the settings of jail.py as JSON, with limits in its units (seconds, bytes)."""
    settings = {
        "prefix": os.path.realpath(sys.base_prefix),
        "program": program,
        "input": given,
        "cpu_s": math.ceil(limits.seconds),
        "memory_bytes": limits.memory_mb * 10**6,
        "disk_bytes": limits.disk_mb * 10**6,
        "processes": limits.processes,
        # A user that is not used otherwise: the kernel counts processes by user.
        "uid": 200_000 + secrets.randbelow(2**30),
    }
    return json.dumps(settings).encode()


def _base_python() -> str:
    """Return the interpreter that this virtual environment was made from."""
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
