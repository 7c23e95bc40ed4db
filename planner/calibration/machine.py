"""What a machine does per second: matrix products, memory, links; measured on all ranks of a pool at the same time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import attrs
import torch
import torch.distributed as dist

from hybridflow.core.contracts.protocol import Protocol
from hybridflow.core.contracts.worker import Worker, register

ROUNDS = 5
"""The best of so many counts."""


@attrs.frozen
class MachineFigures:
    """Of one rank, while the others do the same."""

    name: str
    """What the system calls the device."""
    memory_bytes: float
    """Of the device; of a CPU the rank's share of the machine's."""
    flops: float
    """Operations per second in matrix products of the dtype asked for."""
    memory_rate: float
    """Bytes per second, read and written, in a copy."""
    link_rate: float | None = None
    """Bytes per second and direction, in an all-reduce of large tensors; none: one rank."""
    link_latency: float = 0.0
    """Seconds of one message, in an all-reduce of a small tensor."""


class MachineProbe(Worker):
    """Measures its rank."""

    @register(Protocol.ONE_TO_ALL)
    def measure(self, dtype: str) -> MachineFigures:
        device, ranks = self.context.device, self.context.world_size
        on_gpu = device.type == "cuda"
        side, elements = (8192, 1 << 28) if on_gpu else (1024, 1 << 24)
        a = torch.randn(side, side, device=device, dtype=getattr(torch, dtype))
        flops = 2.0 * side**3 / self._best(lambda: a @ a)
        source = torch.zeros(elements, device=device)
        target = torch.empty_like(source)
        rate = 2.0 * 4 * elements / self._best(lambda: target.copy_(source))
        name, memory = _device(device, ranks)
        if ranks == 1 or not dist.is_initialized():
            return MachineFigures(name, memory, flops, rate)
        small = torch.zeros(64, device=device)
        messages = 2.0 * (ranks - 1)
        latency = self._best(lambda: dist.all_reduce(small), times=20) / messages
        taken = self._best(lambda: dist.all_reduce(source)) - latency * messages
        return MachineFigures(
            name, memory, flops, rate, messages / ranks * 4 * elements / taken, latency
        )

    def _best(self, work: Callable[[], object], times: int = 1) -> float:
        """Seconds of one call of `work`."""
        work()
        found = []
        for _ in range(ROUNDS):
            self._wait()
            started = time.perf_counter()
            for _ in range(times):
                work()
            self._wait()
            found.append((time.perf_counter() - started) / times)
        return min(found)

    def _wait(self) -> None:
        if self.context.device.type == "cuda":
            torch.cuda.synchronize(self.context.device)


def _device(device: torch.device, ranks: int) -> tuple[str, float]:
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        return found.name, float(found.total_memory)
    return "cpu", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / ranks
