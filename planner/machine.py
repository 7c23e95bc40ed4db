"""Times of the elementary operations on equal nodes: matrix products, memory, links."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import attrs

from hybridflow.core.contracts.footprint import Collective
from hybridflow.planner.cluster import GB, Nodes

US = 1e-6


@attrs.frozen(slots=False)
class Machine:
    """Peak figures of the data sheet times efficiencies."""

    nodes: Nodes

    def flops(self, width: int) -> float:
        """Peak of matrix products of numbers of `width` bytes."""
        device = self.nodes.device
        return (device.fp32_tflops if width == 4 and device.fp32_tflops else device.tflops) * 1e12

    @cached_property
    def memory_peak(self) -> float:
        return self.nodes.device.bandwidth_gbs * GB

    @cached_property
    def memory_rate(self) -> float:
        return self.memory_peak * self.nodes.efficiency.memory

    @cached_property
    def optimizer_rate(self) -> float:
        return self.memory_peak * self.nodes.efficiency.optimizer

    @cached_property
    def link_rate(self) -> float:
        return self.nodes.device.link_gbs * GB * self.nodes.efficiency.link

    @cached_property
    def network_rate(self) -> float:
        """Of a whole node."""
        return self.nodes.between_gbs * GB * self.nodes.efficiency.network

    def ring(self, sent: Any, ranks: int, step: int, times: float) -> Any:
        """Seconds of a ring collective over `ranks` ranks that are `step` apart, in which each sends `sent` bytes in all, in
        `times` (ranks - 1) messages. Groups of one node work at the same time and share its way out."""
        if ranks == 1:
            return 0.0
        e = self.nodes.efficiency
        if ranks * step <= self.nodes.per_node:
            return sent / self.link_rate + times * (ranks - 1) * e.link_latency_us * US
        together = min(step, self.nodes.per_node)
        slowest = min(self.link_rate, self.network_rate / together)
        return sent / slowest + times * (ranks - 1) * e.network_latency_us * US

    def all_reduce(self, size: Any, ranks: int, step: int = 1) -> Any:
        return self.ring(2.0 * (ranks - 1) / ranks * size, ranks, step, 2.0)

    def gather(self, size: float, ranks: int, step: int = 1) -> float:
        """All-gather or reduce-scatter of `size` bytes in all."""
        return self.ring((ranks - 1) / ranks * size, ranks, step, 1.0)

    def collectives(self, every: tuple[Collective, ...]) -> float:
        """Seconds of collectives, one after the other."""
        seconds = 0.0
        for one in every:
            ring = self.all_reduce if one.kind == "all_reduce" else self.gather
            seconds += ring(one.nbytes, one.ranks, one.stride) * one.times
        return seconds

    def send(self, size: Any, step: int) -> Any:
        """Of each rank to one that is `step` further."""
        e = self.nodes.efficiency
        if step < self.nodes.per_node:
            return size / self.link_rate + e.link_latency_us * US
        return size * self.nodes.per_node / self.network_rate + e.network_latency_us * US
