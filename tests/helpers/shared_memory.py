"""What lies in /dev/shm that is not of tests that run beside this one."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

ROOT = "HYBRIDFLOW_TESTS"
"""The variable with the process of these tests (conftest.py), which its children inherit."""


def in_shared_memory() -> set[str]:
    """Names below /dev/shm, but for those that only processes of others have mapped."""
    names = {path.name: path for path in Path("/dev/shm").iterdir()}
    ours: set[str] = set()
    others: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        # Processes that end meanwhile, or that may not be read
        with contextlib.suppress(OSError):
            maps = (process / "maps").read_text()
            mapped = {name for name, path in names.items() if str(path) in maps}
            if mapped and _descends(int(process.name)):
                ours |= mapped
            else:
                others |= mapped
    return names.keys() - (others - ours)


def mapped_by(processes: Iterable[int]) -> set[str]:
    """Return the names below /dev/shm that one of these processes has mapped."""
    mapped: set[str] = set()
    for process in processes:
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{process}/maps").read_text()
            mapped |= set(re.findall(r"/dev/shm/(\S+)", maps))
    return mapped


def _descends(process: int) -> bool:
    """Return whether a process is that of these tests, or was started by it."""
    root = int(os.environ[ROOT])
    while process > 1 and process != root:
        stat = Path(f"/proc/{process}/stat").read_text()
        process = int(stat.rpartition(")")[2].split()[1])  # after the name: state, parent
    return process == root
