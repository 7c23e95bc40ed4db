"""Ends the processes of an engine: a process group, and its files under /dev/shm.

The files are found by the processes' numbers in their names, or because a process has mapped them.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

SHARED = Path("/dev/shm")
"""The folder of Linux's shared memory."""


def members(group: int) -> set[int]:
    """Return the living processes of a process group."""
    pids = set()
    for folder in Path("/proc").iterdir():
        # Processes end meanwhile, and not every folder is that of a process.
        with suppress(OSError, ValueError, IndexError):
            # Behind the command in parentheses: state, parent, process group (man 5 proc).
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[2]) == group and fields[0] != "Z":
                pids.add(int(folder.name))
    return pids


def end_group(group: int, known: Iterable[int] = (), patience_s: float = 15.0) -> None:
    """Send SIGKILL until nothing of the group is left, and unlink its files under /dev/shm.

    No process of the group may call it (see `end_own_group`). `known` are processes that were of
    the group earlier. Python's resource trackers may live for `patience_s`: they unlink semaphores,
    whose names do not show their owner, and end when the processes that they serve have ended.
    """
    numbers = {group, *known}
    started = time.monotonic()
    mapped: set[Path] = set()
    # Processes may be started meanwhile, until none is left that could.
    while pids := members(group):
        # The files that a process has mapped are only known while it lives.
        numbers |= pids
        for pid in pids:
            mapped |= _mapped(pid)

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
    """End the process group of this process.

    A new process outside the group does it: while this one lives, more may be started.
    """
    group = os.getpgrp()
    # The new process leaves the group, so that it does not end itself first.
    if os.fork() == 0:
        os.setsid()
        try:
            end_group(group)
        finally:
            os._exit(0)


def _mapped(pid: int) -> set[Path]:
    """Return the files under /dev/shm that a process has mapped.

    An engine's processes share them with each other alone.
    """
    with suppress(OSError):
        lines = (Path("/proc") / str(pid) / "maps").read_text().splitlines()
        # The sixth field of a line is the file.
        return {
            Path(line.split(maxsplit=5)[5])
            for line in lines
            if f" {SHARED}/" in line and "(deleted)" not in line
        }
    return set()


def _sweep(numbers: set[str], mapped: set[Path]) -> None:
    """Unlink this user's files that were mapped, or have one of the numbers in their names."""
    # A number is a part of the name by itself: 12 does not match `sem-123`.
    for path in SHARED.iterdir() if SHARED.is_dir() else ():
        if path in mapped or numbers & set(re.split(r"[_.-]", path.name)):
            with suppress(OSError):
                if path.stat().st_uid == os.getuid():
                    path.unlink()


def _tracks(pid: int) -> bool:
    """Return whether a process is a resource tracker of Python's multiprocessing."""
    with suppress(OSError):
        command = (Path("/proc") / str(pid) / "cmdline").read_bytes()
        return b"multiprocessing.resource_tracker" in command
    return False
