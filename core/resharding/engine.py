"""The 3D-HybridEngine: a training backend and a rollout engine on the same ranks, and the weights between them.

HybridFlow (arXiv:2409.19256), section 5, for any two layouts: what a rank has it aliases or copies, what it lacks comes in
buckets, each byte once. Both sides are known by canonical names and boxes alone.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

import attrs
import torch
import torch.distributed as dist

from hybridflow.core.errors import HybridFlowError
from hybridflow.core.resharding.config import SyncConfig
from hybridflow.core.resharding.exchange import Exchange, Moved, Shards, checksum, same_storage
from hybridflow.core.resharding.explain import amount
from hybridflow.core.resharding.plan import ReshardPlan, plan_reshard
from hybridflow.core.resharding.transport import Link, Transport, choose
from hybridflow.core.rollout import RolloutEngine
from hybridflow.core.training import TrainingBackend
from hybridflow.core.weights import Box, WeightLayout
from hybridflow.core.worker import RankContext

ALL = "tp-cp-pp-dp"


class HybridEngine:
    """One rank's part. All ranks of the role make the same calls."""

    def __init__(
        self, backend: TrainingBackend, engine: RolloutEngine, context: RankContext, config: SyncConfig,
        resident: bool = True,
    ):  # fmt: skip
        """resident: both sides keep their weights where they are, so that they may share them."""
        self.resident = resident
        self.backend, self.engine, self.context, self.config = backend, engine, context, config
        self.last = Moved()
        """What the last sync moved, on this rank."""
        self.aliased_bytes = 0
        """Bytes that the last sync left where they were: one storage serves both sides."""

    @cached_property
    def plan(self) -> ReshardPlan:
        """Raises ReshardError with all that does not fit; made once, since layouts do not change."""
        target = on_every_rank(self.engine.layout(), self.context)
        return plan_reshard(self.backend.layout(), target, int(self.config.bucket_mb * 1e6))

    @cached_property
    def _exchange(self) -> Exchange:
        return Exchange(self.plan, self.context.rank, self.context.device)

    @cached_property
    def _local(self) -> list[tuple[str, Box]]:
        return list(self.plan.local(self.context.rank))

    @cached_property
    def link(self) -> Link:
        group, ranks = self.context.group(ALL), list(range(self.context.world_size))
        names: list[Any] = [node_name()]
        if group is not None:
            names = [None] * len(ranks)
            dist.all_gather_object(names, node_name(), group=group)
        return Link(
            self.context.rank, ranks, self.context.device, group, nodes=dict(zip(ranks, names, strict=True)),
            store=self.context.store, folder=self.config.folder,
        )  # fmt: skip

    @cached_property
    def transport(self) -> Transport:
        return choose(self.config.transport, self.link)(self.link)

    def prepare(self) -> dict[str, Any]:
        """Plan and connect, before the first step; what is to be told of it."""
        self.transport  # noqa: B018  (a transport that cannot serve says so now)
        plan, rank = self.plan, self.context.rank
        if self.config.alias and self.resident and self.engine.lends:
            self._share()
        source = Shards(self.backend.named_shards())
        shared = sum(values.nbytes for _, _, values in self._aliased(source))
        return {
            "received": plan.bytes_received[rank],
            "sent": plan.bytes_sent[rank],
            "peak": plan.source.nbytes(rank) + plan.target.nbytes(rank) - shared,
            "rounds": len(self._exchange.rounds),
            "transport": self.config.transport if self.config.transport != "auto" else type(self.transport).__name__,
        }

    def _share(self) -> None:
        """Let the trainer keep whole parameters in the engine's storage, where both lay them out alike."""
        for name, box in self._local:
            view = self.engine.view(name, box)
            if box != Box.full(self.plan.target.params[name].shape) or view is None or not view.is_contiguous():
                continue
            if self.backend.adopt(self.plan.origin[name], view):
                self.engine.lend(name)

    @torch.no_grad()
    def sync(self) -> float:
        """Bring the training weights to the engine; seconds. Raises on every rank if it failed on any.

        Until it has ended the engine refuses to generate, and the next sync, which moves everything again, mends it.
        """
        started = time.perf_counter()
        plan = self.plan  # before the engine is told: layouts that do not fit cost nothing
        self.engine.begin_update(self.backend.version)
        failure: Exception | None = None
        source = Shards(self.backend.named_shards())
        own = self._own_boxes(source)

        def receive(name: str, box: Box, values: torch.Tensor) -> None:
            deliver(name)  # what this rank has of it comes with it: an engine may have to put it together
            self.engine.receive(name, box, values)

        def deliver(name: str) -> None:
            for box in own.pop(name, ()):
                self.engine.receive(name, box, source.read(plan.origin[name], box))

        try:
            self.last = self._exchange.run(self.transport, source.read, receive)
            for name in list(own):
                deliver(name)
        except Exception as error:
            failure = error
        failed = self.context.max([float(failure is not None)], ALL)[0]
        if failure is not None:
            raise failure
        version = self.backend.version
        if failed:
            raise HybridFlowError(f"the transfer of weights of version {version} failed on another rank; sync again")
        if self.config.verify and (different := differing(plan, self.context, source, self.engine)):
            raise HybridFlowError(
                f"weights of version {version}: {len(different)} parameters differ between training and rollout on some "
                f"rank, the first is {different[0]}; the engine does not generate until a sync succeeds"
            )
        self.engine.end_update()
        return time.perf_counter() - started

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


def node_name() -> str:
    """Equal for processes that share a /dev/shm."""
    return f"{socket.gethostname()}:{os.stat('/dev/shm').st_dev if os.path.isdir('/dev/shm') else ''}"


def on_every_rank(layout: WeightLayout, context: RankContext) -> WeightLayout:
    """An engine of one rank may tell of rank 0 alone: every rank holds what that one does."""
    if set(layout.held) != {0} or (
        context.generation is not None and context.generation.tp * context.generation.pp > 1
    ):
        return layout
    return attrs.evolve(layout, held=dict.fromkeys(range(context.world_size), layout.held[0]))


Sums = dict[tuple[str, int], int]
"""(parameter, receiver) -> the checksum of its wire values."""


@torch.no_grad()
def sums_sent(plan: ReshardPlan, rank: int, source: Shards) -> Sums:
    """Of what a rank sends, and of what it keeps for itself."""
    found: Sums = {}
    pieces = [(t.name, t.receiver, t.box) for t in plan.of_rank(rank)[0]]
    pieces += [(name, rank, box) for name, box in plan.local(rank)]
    for name, receiver, box in pieces:
        _add(found, plan, name, receiver, box, source.read(plan.origin[name], box))
    return found


@torch.no_grad()
def sums_held(plan: ReshardPlan, rank: int, engine: RolloutEngine) -> Sums:
    """Of what a rank's engine holds."""
    found: Sums = {}
    for name, boxes in plan.target.held.get(rank, {}).items():
        for box in boxes:
            if box.numel:
                _add(found, plan, name, rank, box, engine.read(name, box))
    return found


def _add(found: Sums, plan: ReshardPlan, name: str, receiver: int, box: Box, values: torch.Tensor) -> None:
    value = checksum(values.to(plan.wire[name]), box, plan.target.params[name].shape)
    found[name, receiver] = (found.get((name, receiver), 0) + value) & (2**64 - 1)


def compare(every: Iterable[tuple[Sums, Sums]]) -> list[str]:
    """Names of parameters whose sums over all senders are not what their receivers hold; of every rank (sent, held)."""
    expected: Sums = {}
    found: Sums = {}
    for sent, held in every:
        for key, value in sent.items():
            expected[key] = (expected.get(key, 0) + value) & (2**64 - 1)
        found |= held
    return list(dict.fromkeys(key[0] for key, value in found.items() if expected.get(key) != value))


def differing(plan: ReshardPlan, context: RankContext, source: Shards, engine: RolloutEngine) -> list[str]:
    """`compare` over the ranks of one group. A collective call; every rank gets the same list."""
    mine = (sums_sent(plan, context.rank, source), sums_held(plan, context.rank, engine))
    every: list[Any] = [mine]
    group = context.group(ALL)
    if group is not None:
        every = [None] * context.world_size
        dist.all_gather_object(every, mine, group=group)
    return compare(every)


def sync_line(ranks: Sequence[dict[str, Any]]) -> str:
    """What `prepare` told on each rank, as a line before the first step."""
    received, peak = (max(told[key] for told in ranks) for key in ("received", "peak"))
    how = f"{ranks[0]['rounds']} rounds over {ranks[0]['transport']}" if received else "nothing leaves a rank"
    return f"a weight sync receives at most {amount(received)} per rank ({how}); weights take {amount(peak)}"
