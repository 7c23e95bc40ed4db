"""How much memory a phase takes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import attrs
import torch

PROC = Path("/proc/self")


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
