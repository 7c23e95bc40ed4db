"""A machine's rates: matrix products, memory and links, measured on all ranks of a pool at once."""

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
"""Number of measurements; the fastest counts."""


@attrs.frozen
class MachineFigures:
    """Rates of one rank, while the other ranks do the same."""

    name: str
    """The system's name of the device."""
    memory_bytes: float
    """Memory of the device; on a CPU the rank's share of the machine's."""
    flops: float
    """Floating-point operations per second in matrix products of the measured dtype."""
    memory_rate: float
    """Bytes per second, read and written, in a copy."""
    link_rate: float | None = None
    """Bytes per second and direction, in an all-reduce of large tensors; None: one rank."""
    link_latency: float = 0.0
    """Seconds of one message of an all-reduce, measured with a small tensor."""


class MachineProbe(Worker):
    """Measures the rates of its rank."""

    @register(Protocol.ONE_TO_ALL)
    def measure(self, dtype: str) -> MachineFigures:
        """Return this rank's rates; matrix products are of `dtype`, a name such as "bfloat16"."""
        device = self.context.device
        ranks = self.context.world_size
        on_gpu = device.type == "cuda"
        side = 8192 if on_gpu else 1024
        elements = 1 << 28 if on_gpu else 1 << 24

        # A product of n x n matrices takes 2 n^3 operations.
        a = torch.randn(side, side, device=device, dtype=getattr(torch, dtype))
        flops = 2.0 * side**3 / self._best(lambda: a @ a)

        # A copy reads and writes 4 bytes per float32 element.
        source = torch.zeros(elements, device=device)
        target = torch.empty_like(source)
        rate = 2.0 * 4 * elements / self._best(lambda: target.copy_(source))

        name, memory = _device(device, ranks)
        if ranks == 1 or not dist.is_initialized():
            return MachineFigures(name, memory, flops, rate)

        # A ring all-reduce over n ranks takes 2 (n - 1) messages of 1 / n of the tensor. A small
        # tensor takes their latency alone.
        small = torch.zeros(64, device=device)
        messages = 2.0 * (ranks - 1)
        latency = self._best(lambda: dist.all_reduce(small), times=20) / messages
        taken = self._best(lambda: dist.all_reduce(source)) - latency * messages
        link_rate = messages / ranks * 4 * elements / taken
        return MachineFigures(name, memory, flops, rate, link_rate, latency)

    def _best(self, work: Callable[[], object], times: int = 1) -> float:
        """Return the seconds of one call of `work`: the fastest round, each of `times` calls."""
        work()  # the first call allocates, and does not count
        seconds = []
        for _ in range(ROUNDS):
            self._wait()
            started = time.perf_counter()
            for _ in range(times):
                work()
            self._wait()
            seconds.append((time.perf_counter() - started) / times)
        return min(seconds)

    def _wait(self) -> None:
        """Wait until the device has completed all work."""
        if self.context.device.type == "cuda":
            torch.cuda.synchronize(self.context.device)


def _device(device: torch.device, ranks: int) -> tuple[str, float]:
    """Return the system's name of the device, and its memory in bytes (on a CPU a rank's share)."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return properties.name, float(properties.total_memory)
    return "cpu", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / ranks
