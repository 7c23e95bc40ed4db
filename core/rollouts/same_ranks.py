"""The 3D-HybridEngine: a training backend and a rollout engine on the same ranks, and the weights between them.

HybridFlow (arXiv:2409.19256), section 5, for any two layouts: what a rank has it aliases or copies, what it lacks comes in
buckets, each byte once. Both sides are known by canonical names and boxes alone.
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
from hybridflow.core.job.job import AUTO, SyncSpec
from hybridflow.core.resharding.exchange import Exchange, Moved, Shards, same_storage
from hybridflow.core.resharding.plan import ReshardPlan, plan_reshard
from hybridflow.core.rollouts.checksums import differing
from hybridflow.core.rollouts.transports import connect
from hybridflow.core.rollouts.weight_sync import SyncCost, WeightSync, node_name, on_every_rank
from hybridflow.core.values.weights import Box


class HybridEngine(WeightSync):
    """One rank's part. All ranks of the role make the same calls."""

    def __init__(
        self, backend: TrainingBackend, engine: RolloutEngine, context: RankContext, spec: SyncSpec,
        resident: bool = True,
    ):  # fmt: skip
        """resident: both sides keep their weights where they are, so that they may share them."""
        super().__init__(spec)
        self.resident = resident
        self.backend, self.engine, self.context = backend, engine, context
        self.last = Moved()
        """What the last sync moved, on this rank."""
        self.aliased_bytes = 0
        """Bytes that the last sync left where they were: one storage serves both sides."""

    @cached_property
    def plan(self) -> ReshardPlan:
        """Raises ReshardError with all that does not fit; made once, since layouts do not change."""
        target = on_every_rank(self.engine.layout(), self.context)
        return plan_reshard(self.backend.layout(), target, self.spec.bucket_bytes)

    @cached_property
    def _exchange(self) -> Exchange:
        return Exchange(self.plan, self.context.rank, self.context.device)

    @cached_property
    def _local(self) -> list[tuple[str, Box]]:
        return list(self.plan.local(self.context.rank))

    @cached_property
    def link(self) -> Link:
        group, ranks = self.context.group(EVERY_AXIS), list(range(self.context.world_size))
        names: list[Any] = [node_name()]
        if group is not None:
            names = [None] * len(ranks)
            dist.all_gather_object(names, node_name(), group=group)
        return Link(
            self.context.rank, ranks, self.context.device, group, nodes=dict(zip(ranks, names, strict=True)),
            store=self.context.store,
        )  # fmt: skip

    @cached_property
    def transport(self) -> Transport:
        return connect(self.spec, self.link)

    def prepare(self) -> SyncCost:
        """Plan and connect, before the first step; what is to be told of it."""
        transport = self.transport  # one that cannot serve says so now
        plan, rank = self.plan, self.context.rank
        if self.spec.alias and self.resident and self.engine.lends:
            self._share()
        source = Shards(self.backend.named_shards())
        shared = sum(values.nbytes for _, _, values in self._aliased(source))
        return SyncCost(
            received=plan.bytes_received[rank],
            peak=plan.source.nbytes(rank) + plan.target.nbytes(rank) - shared,
            rounds=len(self._exchange.rounds),
            transport=self.spec.transport
            if self.spec.transport != AUTO
            else type(transport).__name__,
        )

    def _share(self) -> None:
        """Let the trainer keep whole parameters in the engine's storage, where both lay them out alike."""
        for name, box in self._local:
            view = self.engine.view(name, box)
            if (
                box != Box.full(self.plan.target.params[name].shape)
                or view is None
                or not view.is_contiguous()
            ):
                continue
            if self.backend.adopt(self.plan.origin[name], view):
                self.engine.lend(name)

    @torch.no_grad()
    def sync(self) -> float:
        """Bring the training weights to the engine; seconds. Raises on every rank if it failed on any."""
        started = time.perf_counter()
        self.plan  # noqa: B018  (before the engine is told: layouts that do not fit cost nothing)
        self.run(self.backend.version)
        return time.perf_counter() - started

    def begin(self, version: int) -> None:
        self.engine.begin_update(version)

    def end(self) -> None:
        self.engine.end_update()

    def differing(self) -> list[str]:
        return differing(self.plan, self.context, Shards(self.backend.named_shards()), self.engine)

    def transfer(self, version: int) -> None:
        """Copy what this rank has, receive what it lacks. A collective call."""
        failure: Exception | None = None
        source = Shards(self.backend.named_shards())
        own = self._own_boxes(source)

        def receive(name: str, box: Box, values: torch.Tensor) -> None:
            deliver(
                name
            )  # what this rank has of it comes with it: an engine may have to put it together
            self.engine.receive(name, box, values)

        def deliver(name: str) -> None:
            for box in own.pop(name, ()):
                self.engine.receive(name, box, source.read(self.plan.origin[name], box))

        try:
            self.last = self._exchange.run(self.transport, source.read, receive)
            for name in list(own):
                deliver(name)
        except Exception as error:
            failure = error
        failed = self.context.max([float(failure is not None)], EVERY_AXIS)[0]
        if failure is not None:
            raise failure
        if failed:
            raise HybridFlowError(
                f"the transfer of weights of version {version} failed on another rank; sync again"
            )

    def _own_boxes(self, source: Shards) -> dict[str, list[Box]]:
        """What this rank has of its new holding, and must copy."""
        aliased = {(name, box): values.nbytes for name, box, values in self._aliased(source)}
        self.aliased_bytes = sum(aliased.values())
        found: dict[str, list[Box]] = {}
        for name, box in self._local:
            if (name, box) not in aliased:
                found.setdefault(name, []).append(box)
        return found

    def _aliased(self, source: Shards) -> Iterator[tuple[str, Box, torch.Tensor]]:
        """What both sides have in one storage: it stays where it is."""
        for name, box in self._local:
            values, view = source.read(self.plan.origin[name], box), self.engine.view(name, box)
            if view is not None and same_storage(view, values):
                yield name, box, values
