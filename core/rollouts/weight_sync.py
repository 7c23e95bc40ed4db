"""Common code of both ways to send a trainer's weights to rollout engines."""

from __future__ import annotations

import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import chain

import attrs

from hybridflow.core.contracts.worker import RankContext
from hybridflow.core.errors import HybridFlowError
from hybridflow.core.resharding.boxes import covers
from hybridflow.core.resharding.plan import ReshardError
from hybridflow.core.values.checksum import PARTS
from hybridflow.core.values.units import amount
from hybridflow.core.values.weights import Box, WeightLayout


@attrs.frozen
class SyncCost:
    """Cost of a weight sync, which is computed and reported before the first step."""

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

    Engines refuse to generate until it has ended. If it fails, the next one repairs it, since that
    moves everything again. There are two kinds: for engines on the trainer's own ranks
    (same_ranks.py), and for engines in a pool of their own (separate.py).
    """

    def __init__(self, verify: bool):
        """verify: every sync proves all values."""
        self.verify = verify
        self.version: int | None = None
        """The version of the weights that the engines hold; None before the first sync, and after
        one that failed."""
        self.proven = 0
        """The number of syncs since the last one that failed, or the start."""

    def forget(self) -> None:
        """Sync next time even at an equal version: the trainer has loaded other weights."""
        self.version = None

    def run(self, version: int) -> None:
        """Send the weights of `version` to the engines, and verify that they have arrived.

        A 32nd of the values is compared, and all of them at the start, after a failure, every 32
        syncs, and with sync.verify. Raises HybridFlowError where weights did not arrive, or differ.
        """
        # A sync that fails leaves 0: the next one proves everything.
        count = self.proven
        self.proven = 0
        self.version = None
        part = None if self.verify else count % PARTS or None

        # An error here leaves the engines between `begin` and `end`, so that they do not generate.
        self.begin(version)
        self.expect(part)
        self.transfer(version)
        if different := self.differing(version, part):
            raise HybridFlowError(
                f"weights of version {version}: {len(different)} parameters differ between "
                f"training and rollout, the first is {first_of(different)}; "
                "the engines do not generate until a sync succeeds"
            )
        self.end()
        self.proven = count + 1
        self.version = version

    def compared(self, version: int) -> dict[str, str]:
        """Compare all values that can be read back between two syncs (see `differing`)."""
        # Outside of a sync: nothing arrives.
        self.expect(None)
        return self.differing(version, None)

    @abstractmethod
    def begin(self, version: int) -> None:
        """Begin the engines' update to the weights of `version`."""

    @abstractmethod
    def expect(self, part: int | None) -> None:
        """Tell the engines which part of the weights their proof is about; None: all."""

    @abstractmethod
    def transfer(self, version: int) -> None:
        """Send the engines the boxes that they lack."""

    @abstractmethod
    def differing(self, version: int, part: int | None) -> dict[str, str]:
        """Return the parameters that differ, and how; part None: all values are compared."""

    @abstractmethod
    def end(self) -> None:
        """End the update; the engines may generate again."""


def first_of(different: Mapping[str, str]) -> str:
    """Return in words the first parameter that differs, and how."""
    name, how = next(iter(different.items()))
    return f"{name} ({how})"


def node_name() -> str:
    """Return the node's name, equal for processes that share a /dev/shm.

    The device of /dev/shm distinguishes containers that have the same host name.
    """
    device = os.stat("/dev/shm").st_dev if os.path.isdir("/dev/shm") else ""
    return f"{socket.gethostname()}:{device}"


def on_every_rank(layout: WeightLayout, context: RankContext) -> WeightLayout:
    """Return the layout of all ranks. If only rank 0 is in `layout`, all hold the same as it.

    Engines on a single rank may return such a layout. Raises ReshardError where the ranks of a
    replica together do not hold all of a parameter, which would then keep its first values.
    """
    # Engines whose model is cut over several ranks report all of them.
    generation = context.generation
    sharded = generation is not None and generation.tp * generation.pp > 1
    if set(layout.held) == {0} and not sharded:
        held = dict.fromkeys(range(context.world_size), layout.held[0])
        layout = attrs.evolve(layout, held=held)
    if generation is None:
        replicas = [[rank] for rank in layout.ranks]
    else:
        replicas = generation.groups("replica")
    check_whole(layout, replicas)
    return layout


def check_whole(layout: WeightLayout, replicas: Sequence[Sequence[int]]) -> None:
    """Raise ReshardError where a replica's ranks together do not hold all of a parameter."""
    shards = layout.shards()
    missing: dict[tuple, list[Box]] = {}  # parameters that are cut alike are looked at once
    for ranks in replicas:
        for name, param in layout.params.items():
            boxes = tuple(shards.get(name, {}).get(rank, ()) for rank in ranks)
            key = (param.shape, boxes)
            if key not in missing:
                missing[key] = covers(Box.full(param.shape), chain.from_iterable(boxes))
            if missing[key]:
                raise ReshardError(
                    f"by its layout(), the engine on rank{'s' if len(ranks) > 1 else ''} "
                    f"{', '.join(map(str, ranks))} does not hold {missing[key][0]} of {name} "
                    f"{list(param.shape)}, so that a sync would leave it as it is; layout() must "
                    "name the boxes of every rank of a replica"
                )


def sync_line(costs: Sequence[SyncCost]) -> str:
    """Return a line about the cost of a sync, over the costs of all ranks."""
    # The rank with the most bytes counts; rounds and transport are equal on all.
    received = max(cost.received for cost in costs)
    peak = max(cost.peak for cost in costs)
    at_peak = f"weights of trainer and engine take {amount(peak)} at its peak"
    if not received:
        return f"a weight sync moves nothing between ranks; {at_peak}"
    how = f"{costs[0].rounds} rounds over {costs[0].transport}"
    return f"a weight sync receives at most {amount(received)} per rank ({how}); {at_peak}"
