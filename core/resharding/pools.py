"""Weights from an actor's pool to engines in a pool of their own: the planner's rounds, by tickets through the controller."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hybridflow.core.errors import HybridFlowError
from hybridflow.core.group import Future, WorkerGroup
from hybridflow.core.protocols import Protocol
from hybridflow.core.resharding.config import SyncConfig
from hybridflow.core.resharding.engine import compare, node_name
from hybridflow.core.resharding.exchange import Exchange, Read, Write
from hybridflow.core.resharding.plan import plan_reshard
from hybridflow.core.resharding.transport import Link, Mailbox, choose
from hybridflow.core.weights import WeightLayout
from hybridflow.core.worker import Worker, register


class PoolSide:
    """One rank of either side. Source ranks come first in the plan's numbering, target ranks behind them."""

    def __init__(
        self, source: WeightLayout, target: WeightLayout, rank: int, device: torch.device, nodes: Sequence[str],
        store: Any, config: SyncConfig,
    ):  # fmt: skip
        self.plan = plan_reshard(source, target, int(config.bucket_mb * 1e6))
        self.exchange = Exchange(self.plan, rank, device)
        link = Link(
            rank,
            self.plan.ranks,
            device,
            grouped=False,
            nodes=dict(enumerate(nodes)),
            store=store,
            folder=config.folder,
        )
        found = choose(config.transport, link)
        if not issubclass(found, Mailbox):
            raise HybridFlowError(f"the transport {config.transport} does not reach another pool")
        self.mailbox: Mailbox = found(link)
        self.rank = rank
        self.told = {"rounds": len(self.exchange.rounds), "transport": found.__name__}

    def post(self, at: int, read: Read) -> dict[int, Any]:
        """Leave round `at`'s messages: receiver -> ticket. Those of the round before the last are forgotten."""
        tickets = self.mailbox.post(self.exchange.pack_all(self.exchange.rounds[at], read))
        self.mailbox.forget(keep=2)
        return tickets

    def fetch(self, at: int, tickets: Mapping[tuple[int, int], Any], write: Write) -> int:
        """Take round `at`'s messages from (sender, receiver) -> ticket; bytes."""
        moved = 0
        for sender, message in self.exchange.rounds[at].receives.items():
            nbytes = self.exchange.message_bytes(message)
            self.exchange.unpack(message, self.mailbox.get(tickets[sender, self.rank], nbytes), write)
            moved += nbytes
        return moved


class PoolMember(Worker):
    """A worker whose group sends weights to another pool, or takes them from one."""

    side: PoolSide
    """After `connect`."""

    @register(Protocol.ONE_TO_ALL)
    def node(self) -> str:
        return node_name()

    @register(Protocol.ONE_TO_ALL)
    def connect(
        self, source: WeightLayout, target: WeightLayout, first: int, nodes: list[str], config: SyncConfig
    ) -> dict[str, Any]:
        """`first`: the plan's number of this group's rank 0. Tells rounds and transport."""
        c = self.context
        self.side = PoolSide(source, target, first + c.rank, c.device, nodes, c.store, config)
        return self.side.told

    @register(Protocol.ONE_TO_ALL)
    def forget_messages(self) -> None:
        self.side.mailbox.forget()


class SeparateRollout:
    """The actor's group and its engines' group, as the controller calls them; generates with the actor's newest weights."""

    def __init__(self, actor: WorkerGroup, engines: WorkerGroup, config: SyncConfig):
        self.actor, self.engines, self.config = actor, engines, config
        self._version: int | None = None
        self._rounds = 0

    def connect(self) -> dict[str, Any]:
        """Plan and connect both sides; what is to be told of it. Raises ReshardError when the models do not fit."""
        source, theirs = self.actor.weight_layout().result(), self.engines.weight_layout().result()
        nodes = [*self.actor.node().result(), *self.engines.node().result()]
        first = self.actor.layout.world
        target = theirs.renumbered(lambda rank: rank + first)
        plan = plan_reshard(source, target, int(self.config.bucket_mb * 1e6))  # problems are said here, once
        told = [side.connect(source, target, offset, nodes, self.config) for side, offset in
                ((self.actor, 0), (self.engines, first))]  # fmt: skip
        names = [result.result() for result in told]
        self._rounds = names[0][0]["rounds"]
        return {
            "received": max(plan.bytes_received.values()),
            "peak": max(plan.peak_bytes.values()),
            "rounds": self._rounds,
            "transport": names[0][0]["transport"],
        }

    def generate(self, batch, sampling, seed, max_tokens=None):
        self.sync()
        return self.engines.generate(batch, sampling, seed, max_tokens)

    def episodes(self, batch, sampling, seed, max_tokens=None):
        self.sync()
        return self.engines.episodes(batch, sampling, seed, max_tokens)

    def sync(self) -> Future:
        """Bring the weights over if they are newer. Until the last round has arrived the engines refuse to generate."""
        version = self.actor.version().result()
        if version == self._version:
            return self.engines.node()  # nothing to wait for
        self._version = None
        self.engines.begin_update(version).result()
        posted = self.actor.post(0) if self._rounds else None
        for at in range(self._rounds):
            assert posted is not None
            tickets = {
                (sender, to): ticket for sender, left in enumerate(posted.result()) for to, ticket in left.items()
            }
            fetched = self.engines.fetch(at, tickets)
            if at + 1 < self._rounds:
                posted = self.actor.post(at + 1)  # packed while the engines take the one before
            fetched.result()
        self.actor.forget_messages().result()
        if self.config.verify:
            self._verify(version)
        ended = self.engines.end_update()
        ended.result()
        self._version = version
        return ended

    def _verify(self, version: int) -> None:
        every: list[tuple[dict, dict]] = [(sent, {}) for sent in self.actor.sums_sent().result()]
        every += [({}, held) for held in self.engines.sums_held().result()]
        if different := compare(every):
            raise HybridFlowError(
                f"weights of version {version}: {len(different)} parameters differ between training and rollout, the first "
                f"is {different[0]}; the engines do not generate until a sync succeeds"
            )
