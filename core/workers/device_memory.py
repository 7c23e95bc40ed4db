"""Measures the memory of a device: its size, and the free part."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import attrs
import torch

from hybridflow.core.contracts.protocol import Protocol
from hybridflow.core.contracts.worker import Worker, register
from hybridflow.core.rollouts.weight_sync import node_name

CGROUP = Path("/sys/fs/cgroup")
"""The folder with the limits of a container in Linux (cgroups, version 2)."""
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables with settings of torch's allocator."""
MEMINFO = Path("/proc/meminfo")


@attrs.frozen
class RankMemory:
    """The memory of one rank's device, in bytes."""

    node: str
    total: int
    free: int
    shared: bool
    """Whether all ranks of the node share it."""


class DeviceWorker(Worker):
    """A worker that measures the memory of its rank's device."""

    @register(Protocol.ONE_TO_ALL)
    def memory(self) -> RankMemory | None:
        """Return the device's present memory; None where the system does not report it."""
        device = self.context.device
        if device.type != "cpu":
            # Memory that earlier models have left in this process is free, too.
            module = torch.get_device_module(device)
            gc.collect()
            module.empty_cache()
            free, total = module.mem_get_info(device)
            return RankMemory(node_name(), total, free, shared=False)
        host = host_memory()
        return None if host is None else RankMemory(node_name(), *host, shared=True)

    @register(Protocol.ONE_TO_ALL)
    def be_deterministic(self) -> None:
        """Have torch choose algorithms whose results do not vary, in this process from now on.

        An operation that has none raises RuntimeError when it is called.
        """
        # cuBLAS reads it when it is first used.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        # Without it torch.empty would write into all that it allocates.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = False

    @register(Protocol.ONE_TO_ALL)
    def grow_segments(self) -> None:
        """Map memory in segments that grow, which leaves fewer gaps between tensors.

        It applies to later allocations of this process. Settings of the allocator in the
        environment take precedence.
        """
        if any(name in os.environ for name in ALLOCATOR):
            return
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def host_memory() -> tuple[int, int] | None:
    """Return (total, available) bytes of this machine, or of the container where that is less."""
    try:
        lines = MEMINFO.read_text().splitlines()
    except OSError:
        return None
    # Lines as "MemAvailable:  7654321 kB", of 1024 bytes.
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    total = sizes["MemTotal"]
    free = sizes.get("MemAvailable", sizes["MemFree"])

    # A limit may be absent, and may be the word "max".
    try:
        limit = int((CGROUP / "memory.max").read_text())
        taken = int((CGROUP / "memory.current").read_text()) - _file_pages()
    except (OSError, ValueError):
        return total, free
    return min(total, limit), min(free, max(limit - taken, 0))


def _file_pages() -> int:
    """Return the bytes of cached files that the container can drop; 0 if they are not known."""
    try:
        lines = (CGROUP / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    stats = dict(line.split() for line in lines)
    return int(stats.get("inactive_file", 0))
