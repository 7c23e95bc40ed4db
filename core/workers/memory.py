"""Measures the memory that a phase takes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import attrs
import torch

PROC = Path("/proc/self")
"""The folder with a process's memory figures in Linux (see proc(5))."""


@attrs.define
class Peak:
    """The memory of a phase, in bytes."""

    before: int = 0
    """Bytes in use when the phase began."""
    most: int = 0
    """The most bytes in use at a time; 0 where that is not known."""


@contextlib.contextmanager
def measured(device: torch.device) -> Iterator[Peak]:
    """Measure the memory that is in use inside the block.

    On a GPU that is the allocated memory, on a CPU the process's resident set (Linux only). `most`
    is set when the block ends.
    """
    peak = Peak()
    if device.type != "cpu":
        module = torch.get_device_module(device)
        module.reset_peak_memory_stats(device)
        peak.before = module.memory_allocated(device)
        yield peak
        peak.most = module.max_memory_allocated(device)
        return

    # Not on other systems, and not where the kernel forbids it.
    try:
        (PROC / "clear_refs").write_text("5")  # resets the highest resident set, VmHWM
        peak.before = _resident("VmRSS")
    except OSError:
        yield peak
        return
    yield peak
    peak.most = _resident("VmHWM")


def _resident(field: str) -> int:
    """Return a field of /proc/self/status in bytes; the file has it in kB of 1024."""
    for line in (PROC / "status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise OSError(f"{PROC}/status has no {field}")
