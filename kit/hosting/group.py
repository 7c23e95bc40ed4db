"""The processes of an engine: a process group, and the files under /dev/shm that carry their numbers in their names."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

SHARED = Path("/dev/shm")


def members(group: int) -> set[int]:
    """The living processes of a process group."""
    found = set()
    for folder in Path("/proc").iterdir():
        with suppress(OSError, ValueError, IndexError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[2]) == group and fields[0] != "Z":
                found.add(int(folder.name))
    return found


def end_group(group: int, known: Iterable[int] = (), patience_s: float = 5.0) -> None:
    """SIGKILL the group until nothing of it is left, and unlink what it leaves under /dev/shm. Not called by one of it.

    `known`: processes that were of it. Python's resource trackers may live for `patience_s`: they unlink semaphores, whose
    names say nothing, and end when nobody is left whom they serve.
    """
    numbers, started = {group, *known}, time.monotonic()
    mapped: set[Path] = set()
    while pids := members(group):
        numbers |= pids
        mapped |= {path for pid in pids for path in _mapped(pid)}
        waited = time.monotonic() - started
        for pid in pids:
            if waited > patience_s or not _tracks(pid):
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        if waited > 2 * patience_s:
            break
        time.sleep(0.02)
    _sweep({str(pid) for pid in numbers}, mapped)


def end_own_group() -> None:
    """End the group that this process is of. A process outside does it: while we live, more may be started."""
    group = os.getpgrp()
    if os.fork() == 0:
        os.setsid()
        try:
            end_group(group)
        finally:
            os._exit(0)


def _mapped(pid: int) -> set[Path]:
    """Files under /dev/shm that a process has mapped. An engine's processes share them with each other alone."""
    with suppress(OSError):
        lines = (Path("/proc") / str(pid) / "maps").read_text().splitlines()
        return {
            Path(line.split(maxsplit=5)[5])
            for line in lines
            if f" {SHARED}/" in line and "(deleted)" not in line
        }
    return set()


def _sweep(numbers: set[str], mapped: set[Path]) -> None:
    for path in SHARED.iterdir() if SHARED.is_dir() else ():
        if path in mapped or numbers & set(re.split(r"[_.-]", path.name)):
            with suppress(OSError):
                if path.stat().st_uid == os.getuid():
                    path.unlink()


def _tracks(pid: int) -> bool:
    with suppress(OSError):
        return (
            b"multiprocessing.resource_tracker"
            in (Path("/proc") / str(pid) / "cmdline").read_bytes()
        )
    return False
