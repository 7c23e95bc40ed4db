"""Programs of a model, run apart from this machine: limits of time, memory, files and processes, no network, no files of ours.

Linux: namespaces (as root, or by user namespaces), a root directory of its own with Python's standard library in it, read-only,
and a small tmpfs. What a kernel bug lets through is not stopped, and memory is limited per process: it is a sandbox for
clumsy programs and simple tricks, not for attackers.
"""

from __future__ import annotations

import contextlib
import json
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
REFUSED = 125


@attrs.frozen
class Limits:
    """Of one program."""

    seconds: float = attrs.field(default=5.0, validator=positive)
    """Wall time; the CPU time is limited to it too, rounded up."""
    memory_mb: int = attrs.field(default=256, validator=at_least(32))
    """Address space of each process, 10^6 bytes."""
    disk_mb: int = attrs.field(default=8, validator=at_least(1))
    """Files in all, 10^6 bytes."""
    processes: int = attrs.field(default=8, validator=at_least(1))
    """Processes and threads at a time."""
    output_bytes: int = attrs.field(default=65_536, validator=at_least(1))
    """Of standard output and of standard error each; a program that writes more is ended."""


@attrs.frozen
class Outcome:
    """What became of a program."""

    reason: str
    """"ended", "time" (its limit), or "output" (its limit)."""
    status: int
    """Exit status; 128 + n: signal n."""
    output: str
    errors: str

    @property
    def good(self) -> bool:
        return self.reason == "ended" and self.status == 0


def run_program(program: str, given: str | None = None, limits: Limits | None = None) -> Outcome:
    """Run Python text with `given` as its standard input. Raises RewardError where this machine cannot isolate it."""
    limits = limits or Limits()
    root = tempfile.mkdtemp(prefix="hybridflow-jail-")
    python = os.path.realpath(sys.executable) if sys.prefix == sys.base_prefix else _base_python()
    settings = json.dumps(
        {
            "root": root, "prefix": os.path.realpath(sys.base_prefix), "python": python, "program": program, "input": given,
            "cpu_s": int(-(-limits.seconds // 1)), "memory_bytes": limits.memory_mb * 10**6,
            "disk_bytes": limits.disk_mb * 10**6, "processes": limits.processes, "uid": 200_000 + secrets.randbelow(2**30),
        }
    ).encode()  # fmt: skip
    command = [python, "-I", "-S", str(JAIL), str(len(settings))]
    process = subprocess.Popen(
        command,
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
    if status == REFUSED and errors.startswith("cannot isolate"):
        raise RewardError(
            f"this machine does not let a program run apart from it ({errors.strip()}); a sandbox needs Linux namespaces: "
            "run as root, or allow user namespaces (sysctl kernel.unprivileged_userns_clone=1, user.max_user_namespaces)"
        )
    return Outcome(reason, status if status >= 0 else 128 - status, output, errors)


def _base_python() -> str:
    """The interpreter that a virtual environment is made of."""
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return os.path.realpath(
        getattr(sys, "_base_executable", "") or os.path.join(sys.base_prefix, "bin", name)
    )


def _read(process: subprocess.Popen, limits: Limits) -> tuple[str, str, str]:
    """(reason, output, errors), until both are closed or a limit is reached."""
    until = time.monotonic() + limits.seconds
    found: dict[str, bytes] = {"out": b"", "err": b""}
    with selectors.DefaultSelector() as selector:
        for stream, name in ((process.stdout, "out"), (process.stderr, "err")):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
            selector.register(stream, selectors.EVENT_READ, name)
        reason = "ended"
        while selector.get_map():
            left = until - time.monotonic()
            ready = selector.select(left) if left > 0 else []
            if not ready and time.monotonic() >= until:
                reason = "time"
                break
            for key, _ in ready:
                piece = os.read(key.fd, 65_536)
                if not piece:
                    selector.unregister(key.fileobj)
                found[key.data] += piece
            if max(map(len, found.values())) > limits.output_bytes:
                reason = "output"
                break
    if reason == "ended":
        try:
            process.wait(max(until - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            reason = "time"
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()
    texts = [value[: limits.output_bytes].decode(errors="replace") for value in found.values()]
    return reason, texts[0], texts[1]
