"""Bringing a trainer's weights to rollout engines: what both ways have in common."""

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
    """What a weight sync moves; it is known, and reported, before the first step."""

    received: int
    """The most bytes that a rank receives."""
    peak: int
    """The most bytes of weights that a rank holds at a time."""
    rounds: int
    """The number of rounds of messages."""
    transport: str
    """The transport's name."""


class WeightSync(ABC):
    """One update of the engines' weights.

    Engines refuse to generate until it has ended. If it fails, the next one repairs it, since
    that moves everything again. There are two kinds: engines on the trainer's own ranks
    (same_ranks.py), and engines in a pool of their own (separate.py).
    """

    def __init__(self, spec: SyncSpec):
        self.spec = spec

    def run(self, version: int) -> None:
        """Bring the weights of `version` to the engines.

        Raises HybridFlowError where they did not arrive, or differ (sync.verify).
        """
        # What raises here leaves the engines between `begin` and `end`: they do not generate.
        self.begin(version)
        self.transfer(version)
        if self.spec.verify and (different := self.differing()):
            raise HybridFlowError(
                f"weights of version {version}: {len(different)} parameters differ between "
                f"training and rollout, the first is {different[0]}; "
                "the engines do not generate until a sync succeeds"
            )
        self.end()

    @abstractmethod
    def begin(self, version: int) -> None:
        """Tell the engines that weights of `version` come."""

    @abstractmethod
    def transfer(self, version: int) -> None:
        """Move what the engines lack."""

    @abstractmethod
    def differing(self) -> list[str]:
        """Return the parameters whose checksums on both sides differ."""

    @abstractmethod
    def end(self) -> None:
        """Let the engines generate."""


def node_name() -> str:
    """Return the node's name, equal for processes that share a /dev/shm.

    The device of /dev/shm tells containers apart that have the same host name.
    """
    device = os.stat("/dev/shm").st_dev if os.path.isdir("/dev/shm") else ""
    return f"{socket.gethostname()}:{device}"


def on_every_rank(layout: WeightLayout, context: RankContext) -> WeightLayout:
    """Return the layout of all ranks, from one that an engine on a single rank may give of rank 0
    alone.

    Every rank then holds what that one does.
    """
    # Engines whose model is cut over several ranks report all of them.
    generation = context.generation
    sharded = generation is not None and generation.tp * generation.pp > 1
    if set(layout.held) != {0} or sharded:
        return layout
    held = layout.held[0]
    return attrs.evolve(layout, held=dict.fromkeys(range(context.world_size), held))


def sync_line(costs: Sequence[SyncCost]) -> str:
    """Return a line about the cost of a sync, over the costs of all ranks."""
    # The rank with the most bytes counts; rounds and transport are equal on all.
    received = max(cost.received for cost in costs)
    peak = max(cost.peak for cost in costs)
    how = "nothing leaves a rank"
    if received:
        how = f"{costs[0].rounds} rounds over {costs[0].transport}"
    return (
        f"a weight sync receives at most {amount(received)} per rank ({how}); "
        f"weights take {amount(peak)}"
    )
