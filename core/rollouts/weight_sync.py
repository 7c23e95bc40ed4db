"""Bringing a trainer's weights to rollout engines: what every road has in common."""

from __future__ import annotations

import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Sequence

import attrs

from hybridflow.core.contracts.worker import RankContext
from hybridflow.core.errors import HybridFlowError
from hybridflow.core.job.job import SyncSpec
from hybridflow.core.values.units import amount
from hybridflow.core.values.weights import WeightLayout


@attrs.frozen
class SyncCost:
    """What a sync of weights moves, as it is told before the first step."""

    received: int
    """Bytes that a rank receives, at most."""
    peak: int
    """Bytes of weights that a rank holds, at most."""
    rounds: int
    transport: str


class WeightSync(ABC):
    """One update of the engines' weights. Until it has ended they refuse to generate; the next one, which moves everything
    again, mends one that failed.

    Two roads: engines on the trainer's own ranks (same_ranks.py), and engines in a pool of their own (separate.py).
    """

    def __init__(self, spec: SyncSpec):
        self.spec = spec

    def run(self, version: int) -> None:
        """Bring the weights of `version` over. Raises HybridFlowError where they did not arrive, or differ (sync.verify)."""
        self.begin(version)
        self.transfer(version)
        if self.spec.verify and (different := self.differing()):
            raise HybridFlowError(
                f"weights of version {version}: {len(different)} parameters differ between training and rollout, the first "
                f"is {different[0]}; the engines do not generate until a sync succeeds"
            )
        self.end()

    @abstractmethod
    def begin(self, version: int) -> None:
        """Tell the engines that weights of `version` come."""

    @abstractmethod
    def transfer(self, version: int) -> None:
        """Move what engines lack."""

    @abstractmethod
    def differing(self) -> list[str]:
        """Parameters whose checksums on both sides differ."""

    @abstractmethod
    def end(self) -> None:
        """Let the engines generate."""


def node_name() -> str:
    """Equal for processes that share a /dev/shm."""
    return (
        f"{socket.gethostname()}:{os.stat('/dev/shm').st_dev if os.path.isdir('/dev/shm') else ''}"
    )


def on_every_rank(layout: WeightLayout, context: RankContext) -> WeightLayout:
    """An engine of one rank may tell of rank 0 alone: every rank holds what that one does."""
    if set(layout.held) != {0} or (
        context.generation is not None and context.generation.tp * context.generation.pp > 1
    ):
        return layout
    return attrs.evolve(layout, held=dict.fromkeys(range(context.world_size), layout.held[0]))


def sync_line(costs: Sequence[SyncCost]) -> str:
    """What a sync costs on each rank, as a line before the first step."""
    received, peak = max(cost.received for cost in costs), max(cost.peak for cost in costs)
    how = (
        f"{costs[0].rounds} rounds over {costs[0].transport}"
        if received
        else "nothing leaves a rank"
    )
    return f"a weight sync receives at most {amount(received)} per rank ({how}); weights take {amount(peak)}"
