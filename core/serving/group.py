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


def end_group(group: int, known: Iterable[int] = ()) -> None:
    """SIGKILL the group, this process last if it is of it, and unlink what it leaves under /dev/shm.

    `known`: processes that were of it. Python's resource trackers are let live: they unlink semaphores, whose names say
    nothing, and end when nobody is left whom they serve.
    """
    pids = members(group)
    numbers = {str(pid) for pid in {group, *known, *pids}}
    for pid in pids - {os.getpid()}:
        if not _tracks(pid):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
    for path in SHARED.iterdir() if SHARED.is_dir() else ():
        if numbers & set(re.split(r"[_.-]", path.name)):
            with suppress(OSError):
                if path.stat().st_uid == os.getuid():
                    path.unlink()
    if os.getpid() in pids:
        os._exit(1)


def wait_empty(group: int, seconds: float) -> None:
    """Until nothing of the group is left; what then still is, is killed."""
    deadline = time.monotonic() + seconds
    while members(group):
        if time.monotonic() > deadline:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)
            return
        time.sleep(0.02)


def _tracks(pid: int) -> bool:
    with suppress(OSError):
        return b"multiprocessing.resource_tracker" in (Path("/proc") / str(pid) / "cmdline").read_bytes()
    return False
