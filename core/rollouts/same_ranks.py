"""The 3D-HybridEngine: a training backend and a rollout engine on the same ranks.

It copies the weights from the backend to the engine: HybridFlow (arXiv:2409.19256), section 5, for
any two layouts. Both sides are described only by canonical parameter names and boxes. For each box
that a rank's engine holds, the rank's trainer

    has it, in the same storage      ->  aliased: nothing moves
    has it, in storage of its own    ->  copied on the rank
    lacks it                         ->  received, in rounds of messages, each byte once
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from hybridflow.core.contracts.rollout import RolloutEngine
from hybridflow.core.contracts.training import TrainingBackend
from hybridflow.core.contracts.transport import Link, Transport
from hybridflow.core.contracts.worker import EVERY_AXIS, RankContext
from hybridflow.core.errors import HybridFlowError
from hybridflow.core.job.job import AUTO, Chosen
from hybridflow.core.resharding.exchange import Exchange, Moved, ShardReader, same_storage
from hybridflow.core.resharding.plan import ReshardPlan
from hybridflow.core.rollouts.checksums import differing, wanted
from hybridflow.core.rollouts.transports import connect
from hybridflow.core.rollouts.weight_sync import SyncCost, WeightSync, node_name
from hybridflow.core.values.weights import Box


class HybridEngine(WeightSync):
    """One rank's part of the sync. All ranks of the role make the same calls."""

    def __init__(
        self,
        backend: TrainingBackend,
        engine: RolloutEngine,
        context: RankContext,
        plan: ReshardPlan,
        transport: Chosen,
        verify: bool = False,
        share: bool = True,
    ):
        """plan: from the trainer's layout to the engine's, which both do not change.

        share: whether both sides may use one storage, since neither moves its weights.
        """
        super().__init__(verify)
        self.plan = plan
        self.share = share
        self.chosen = transport
        self.backend = backend
        self.engine = engine
        self.context = context
        self.last = Moved()
        """Figures of the last sync on this rank."""
        self.aliased_bytes = 0
        """Bytes that the last sync did not copy, as both sides share their storage."""
        self._shared: set[str] = set()
        """Parameters that the trainer keeps in the engine's storage."""

    @cached_property
    def _exchange(self) -> Exchange:
        return Exchange(self.plan, self.context.rank, self.context.device)

    @cached_property
    def _local(self) -> list[tuple[str, Box]]:
        """The boxes that this rank's engine holds and its trainer has."""
        return list(self.plan.local(self.context.rank))

    @cached_property
    def link(self) -> Link:
        """The ranks of the role, for a transport. The first use is a collective call."""
        context = self.context
        ranks = list(range(context.world_size))
        group = context.group(EVERY_AXIS)
        # Which ranks share a node decides which transports reach them.
        names: list[Any] = [node_name()]
        if group is not None:
            names = [None] * len(ranks)
            dist.all_gather_object(names, node_name(), group=group)
        return Link(
            context.rank,
            ranks,
            context.device,
            group,
            nodes=dict(zip(ranks, names, strict=True)),
            store=context.store,
        )

    @cached_property
    def transport(self) -> Transport:
        """The transport that carries the messages. Raises HybridFlowError if none can."""
        return connect(self.chosen, self.link)

    def prepare(self) -> SyncCost:
        """Connect, before the first step; return this rank's cost of a sync."""
        transport = self.transport  # a transport that cannot connect the ranks raises now
        plan = self.plan
        rank = self.context.rank
        if self.share and self.engine.lends:
            self._share()

        # Shared storage counts once.
        source = ShardReader(self.backend.named_shards())
        shared = sum(values.nbytes for _, _, values in self._aliased(source))
        name = self.chosen.name
        return SyncCost(
            received=plan.bytes_received[rank],
            peak=plan.source.nbytes(rank) + plan.target.nbytes(rank) - shared,
            rounds=len(self._exchange.rounds),
            transport=name if name != AUTO else type(transport).__name__,
        )

    def _share(self) -> None:
        """Let the trainer keep parameters in the engine's storage.

        Only parameters that both sides hold whole, in the same memory order, can be shared.
        """
        for name, box in self._local:
            view = self.engine.view(name, box)
            whole = box == Box.full(self.plan.target.params[name].shape)
            if not whole or view is None or not view.is_contiguous():
                continue
            # Either side may decline: the backend in `adopt`, the engine by having no view.
            if self.backend.adopt(self.plan.origin[name], view):
                self.engine.lend(name)
                self._shared.add(name)

    @torch.no_grad()
    def sync(self) -> float:
        """Update the engine with the training weights; return the seconds that it took.

        Raises on every rank if it failed on any.
        """
        started = time.perf_counter()
        self.run(self.backend.version)
        return time.perf_counter() - started

    def begin(self, version: int) -> None:
        """Begin the update: the engine refuses to generate until `end`."""
        self.engine.begin_update(version)

    def expect(self, part: int | None) -> None:
        self.engine.expect(wanted(self.plan, self.context.rank, part))

    def end(self) -> None:
        self.engine.end_update()

    def differing(self, version: int, part: int | None) -> dict[str, str]:
        source = ShardReader(self.backend.named_shards())
        return differing(self.plan, self.context, source, self.engine, version, part)

    def transfer(self, version: int) -> None:
        """Copy the boxes that this rank has, and receive the others. A collective call."""
        # Boxes in shared storage are not in `own`: they need no copy.
        failure: Exception | None = None
        source = ShardReader(self.backend.named_shards())
        own = self._own_boxes(source)

        def deliver(name: str) -> None:
            for box in own.pop(name, ()):
                self.engine.receive(name, box, source.read(self.plan.origin[name], box))

        # The rank's own boxes of a parameter are copied with the first box that it receives of it:
        # an engine may have to assemble the parameter.
        def receive(name: str, box: Box, values: torch.Tensor) -> None:
            deliver(name)
            self.engine.receive(name, box, values)

        try:
            self.last = self._exchange.run(self.transport, source.read, receive)
            for name in list(own):
                deliver(name)
        except Exception as error:
            failure = error

        # Every rank learns of a failure on any rank.
        failed = self.context.max([float(failure is not None)], EVERY_AXIS)[0]
        if failure is not None:
            raise failure
        if failed:
            raise HybridFlowError(
                f"the transfer of weights of version {version} failed on another rank; sync again"
            )

    def _own_boxes(self, source: ShardReader) -> dict[str, list[Box]]:
        """Return, by parameter, the engine's boxes that this rank's trainer has, to be copied."""
        aliased = {(name, box): values.nbytes for name, box, values in self._aliased(source)}
        self.aliased_bytes = sum(aliased.values())
        boxes: dict[str, list[Box]] = {}
        for name, box in self._local:
            if (name, box) not in aliased:
                boxes.setdefault(name, []).append(box)
        return boxes

    def _aliased(self, source: ShardReader) -> Iterator[tuple[str, Box, torch.Tensor]]:
        """Yield the boxes that both sides have in one storage, which need no copy."""
        for name, box in self._local:
            # Other parameters are not read here: reading a LazyShard computes its values.
            if name not in self._shared:
                continue
            values = source.read(self.plan.origin[name], box)
            view = self.engine.view(name, box)
            if view is not None and same_storage(view, values):
                yield name, box, values
