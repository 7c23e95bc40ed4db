"""Times of the elementary operations on equal nodes: matrix products, memory, links.

A message of n bytes takes n / bandwidth + latency (the alpha-beta model of communication).
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import attrs

from hybridflow.core.contracts.footprint import CollectiveCost
from hybridflow.planner.cluster import GB, Nodes

US = 1e-6
"""Seconds of a microsecond."""


@attrs.frozen(slots=False)
class Machine:
    """Rates that nodes reach: the peak figures of the data sheet times the efficiencies."""

    nodes: Nodes

    def flops(self, width: int) -> float:
        """Peak operations per second of matrix products of numbers of `width` bytes."""
        # Float32 has a rate of its own where the data sheet states one.
        device = self.nodes.device
        if width == 4 and device.fp32_tflops:
            return device.fp32_tflops * 1e12
        return device.tflops * 1e12

    @cached_property
    def memory_peak(self) -> float:
        """Bytes per second of a device's memory, by its data sheet."""
        return self.nodes.device.bandwidth_gbs * GB

    @cached_property
    def memory_rate(self) -> float:
        """The memory bandwidth that decoding reaches on a device, in bytes per second."""
        return self.memory_peak * self.nodes.efficiency.memory

    @cached_property
    def optimizer_rate(self) -> float:
        """The memory bandwidth that an optimizer step reaches on a device, in bytes per second."""
        return self.memory_peak * self.nodes.efficiency.optimizer

    @cached_property
    def link_rate(self) -> float:
        """Bytes per second that a device sends to others of its node."""
        return self.nodes.device.link_gbs * GB * self.nodes.efficiency.link

    @cached_property
    def network_rate(self) -> float:
        """Bytes per second that a whole node sends to others."""
        return self.nodes.between_gbs * GB * self.nodes.efficiency.network

    def ring(self, sent: Any, ranks: int, step: int, times: float) -> Any:
        """Return the seconds of a ring collective over `ranks` ranks with the distance `step`.

        Each rank sends `sent` bytes in all, in times * (ranks - 1) messages, one after the other:

            seconds = sent / rate + times * (ranks - 1) * latency

        Inside a node the rate is the link's. Beyond it, groups that begin at neighbouring ranks
        work at the same time, and so min(step, ranks of a node) of them share a node's network.
        """
        if ranks == 1:
            return 0.0

        # Inside a node every rank has links of its own.
        e = self.nodes.efficiency
        if ranks * step <= self.nodes.per_node:
            return sent / self.link_rate + times * (ranks - 1) * e.link_latency_us * US

        # Beyond it the slower of a rank's link and its share of the network counts.
        together = min(step, self.nodes.per_node)
        slowest = min(self.link_rate, self.network_rate / together)
        return sent / slowest + times * (ranks - 1) * e.network_latency_us * US

    def all_reduce(self, size: Any, ranks: int, step: int = 1) -> Any:
        """Return the seconds of an all-reduce of a tensor of `size` bytes.

        It is a reduce-scatter and an all-gather, so of n ranks each sends 2 (n - 1) / n of it.
        """
        return self.ring(2.0 * (ranks - 1) / ranks * size, ranks, step, 2.0)

    def gather(self, size: float, ranks: int, step: int = 1) -> float:
        """Return the seconds of an all-gather or a reduce-scatter of a whole tensor of `size`
        bytes.

        Of n ranks each sends n - 1 parts of size / n.
        """
        return self.ring((ranks - 1) / ranks * size, ranks, step, 1.0)

    def collectives(self, every: tuple[CollectiveCost, ...]) -> float:
        """Return the seconds of collectives, one after the other."""
        # A reduce-scatter moves as many bytes as an all-gather.
        seconds = 0.0
        for collective in every:
            operation = self.all_reduce if collective.kind == "all_reduce" else self.gather
            once = operation(collective.nbytes, collective.ranks, collective.stride)
            seconds += once * collective.times
        return seconds

    def send(self, size: Any, step: int) -> Any:
        """Return the seconds in which each rank sends `size` bytes to the rank `step` further.

        From `step` = ranks of a node on, all of them leave the node and share its network.
        """
        # All ranks of a node send at the same time.
        e = self.nodes.efficiency
        if step < self.nodes.per_node:
            return size / self.link_rate + e.link_latency_us * US
        return size * self.nodes.per_node / self.network_rate + e.network_latency_us * US
