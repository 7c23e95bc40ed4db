"""Memory of a process: how much a phase takes, and that freed pages are kept."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path

import attrs
import torch

PROC = Path("/proc/self")

KEPT_BYTES = 1 << 30
"""Allocations from this size on still go back to the system when they are freed, and so does what is free beyond it."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Of glibc's malloc.h."""


def keep_freed_memory() -> bool:
    """For this process, from now on; false where the C library is not glibc.

    By default every tensor from 32 MB on is a mapping of its own, whose pages the kernel clears, again, when they are first
    written: reading a column of 128 MB took 20 to 500 ms, and 15 ms with memory that was there before.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        return all(mallopt(option, KEPT_BYTES) == 1 for option in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD))
    return False


@attrs.define
class Peak:
    """What a phase took, in bytes."""

    before: int = 0
    """In use when it began."""
    most: int = 0
    """The most that was in use at a time; 0 where that is not known."""


@contextlib.contextmanager
def measured(device: torch.device) -> Iterator[Peak]:
    """The memory that is in use inside the block: allocated on a GPU; on a CPU the process's resident set (Linux)."""
    found = Peak()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        found.before = torch.cuda.memory_allocated(device)
        yield found
        found.most = torch.cuda.max_memory_allocated(device)
        return
    try:
        (PROC / "clear_refs").write_text("5")  # the highest resident set is counted anew
        found.before = _resident("VmRSS")
    except OSError:
        yield found
        return
    yield found
    found.most = _resident("VmHWM")


def _resident(field: str) -> int:
    for line in (PROC / "status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise OSError(f"{PROC}/status has no {field}")
