"""Runs programs that a model wrote, isolated from this machine.

They have limits of time, memory, files and processes, no network, and no access to our files:

    run_program -- settings, on stdin --> jail.py          new namespaces
         ^                                 `- supervise    process 1 of them; a root of its own
         |                                     `- program  limits, no privileges
         `-- stdout, stderr, exit status --------'

It needs Linux: namespaces (as root, or by user namespaces), and a root directory that holds
Python's standard library, read-only, and a small tmpfs. A bug in the kernel could let a program
escape, and memory is limited per process only. So this protects from faulty programs and simple
tricks, not from attackers.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import attrs

from hybridflow.core.errors import RewardError
from hybridflow.core.validators import at_least, positive

JAIL = Path(__file__).with_name("jail.py")
"""The script that isolates a program."""
REFUSED = 125
"""Exit status of JAIL where it could not isolate itself, and ran nothing."""


@attrs.frozen
class Limits:
    """The limits of one program."""

    seconds: float = attrs.field(default=5.0, validator=positive)
    """Wall time. The CPU time is limited to as much, rounded up to seconds."""
    memory_mb: int = attrs.field(default=256, validator=at_least(32))
    """Address space of each process, in MB (10^6 bytes)."""
    disk_mb: int = attrs.field(default=8, validator=at_least(1))
    """Size of all files that the program writes, in MB (10^6 bytes)."""
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
    root = tempfile.mkdtemp(prefix="hybridflow-jail-")
    python = os.path.realpath(sys.executable) if sys.prefix == sys.base_prefix else _base_python()
    settings = _jail_settings(root, python, program, given, limits)
    process = subprocess.Popen(
        [python, "-I", "-S", str(JAIL), str(len(settings))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={},
        cwd="/",
        start_new_session=True,
    )

    try:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(settings)
            process.stdin.close()
        reason, output, errors = _read(process, limits)
    finally:
        if process.poll() is None:
            process.kill()  # what it started dies with it
        status = process.wait()
        shutil.rmtree(root, ignore_errors=True)

    # A program may exit with this status too, but jail.py changes it then.
    if status == REFUSED and errors.startswith("cannot isolate"):
        raise RewardError(
            f"this machine does not let a program run apart from it ({errors.strip()}); a sandbox "
            "needs Linux namespaces: run as root, or allow user namespaces (sysctl "
            "kernel.unprivileged_userns_clone=1, user.max_user_namespaces)"
        )
    return ProgramOutcome(reason, status if status >= 0 else 128 - status, output, errors)


def _jail_settings(
    root: str, python: str, program: str, given: str | None, limits: Limits
) -> bytes:
    """Return the settings of jail.py as JSON, with limits in its units (seconds, bytes)."""
    settings = {
        "root": root,
        "prefix": os.path.realpath(sys.base_prefix),
        "python": python,
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


def _read(process: subprocess.Popen, limits: Limits) -> tuple[str, str, str]:
    """Read both streams until they are closed, or until a limit is reached.

    Returns (reason, output, errors), as Outcome has them.
    """
    deadline = time.monotonic() + limits.seconds
    contents: dict[str, bytes] = {"out": b"", "err": b""}
    with selectors.DefaultSelector() as selector:
        for stream, name in ((process.stdout, "out"), (process.stderr, "err")):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
            selector.register(stream, selectors.EVENT_READ, name)

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
                    selector.unregister(key.fileobj)
                contents[key.data] += piece
            if max(map(len, contents.values())) > limits.output_bytes:
                reason = "output"
                break

    # A program may close its streams and continue to run.
    if reason == "ended":
        try:
            process.wait(max(deadline - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            reason = "time"

    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()
    texts = [value[: limits.output_bytes].decode(errors="replace") for value in contents.values()]
    return reason, texts[0], texts[1]
