"""Weights from an actor's pool to engines in a pool of their own: the planner's rounds, by tickets through the controller."""

from __future__ import annotations

from collections.abc import Sequence

from hybridflow.core.contracts.rollout import SamplingParams
from hybridflow.core.groups.group import Future, WorkerGroup
from hybridflow.core.job.job import SyncSpec
from hybridflow.core.resharding.plan import plan_reshard
from hybridflow.core.rollouts.checksums import Sums, compare
from hybridflow.core.rollouts.weight_sync import SyncCost, WeightSync
from hybridflow.core.values.batch import Batch


class SeparateRollout(WeightSync):
    """The actor's group and its engines' group, as the controller calls them; generates with the actor's newest weights."""

    def __init__(self, actor: WorkerGroup, engines: WorkerGroup, spec: SyncSpec):
        super().__init__(spec)
        self.actor, self.engines = actor, engines
        self._version: int | None = None
        self._rounds = 0

    def connect(self) -> SyncCost:
        """Plan and connect both sides; what is to be told of it. Raises ReshardError when the models do not fit."""
        source, theirs = self.actor.weight_layout().result(), self.engines.weight_layout().result()
        nodes = [*self.actor.node().result(), *self.engines.node().result()]
        first = self.actor.layout.world
        target = theirs.renumbered(lambda rank: rank + first)
        plan = plan_reshard(source, target, self.spec.bucket_bytes)  # problems are said here, once
        calls = [
            group.connect(source, target, offset, nodes, self.spec)
            for group, offset in ((self.actor, 0), (self.engines, first))
        ]
        connected = [call.result() for call in calls]
        self._rounds, transport = connected[0][0]
        return SyncCost(
            max(plan.bytes_received.values()),
            max(plan.peak_bytes.values()),
            self._rounds,
            transport,
        )

    def generate(
        self,
        batch: Batch,
        sampling: SamplingParams,
        seed: int,
        max_tokens: Sequence[int] | None = None,
    ) -> Batch:
        self.sync()
        return self.engines.generate(batch, sampling, seed, max_tokens)

    def episodes(
        self,
        batch: Batch,
        sampling: SamplingParams,
        seed: int,
        max_tokens: Sequence[int] | None = None,
    ) -> Batch:
        self.sync()
        return self.engines.episodes(batch, sampling, seed, max_tokens)

    def sync(self) -> Future:
        """Bring the weights over if they are newer; nothing is left to wait for."""
        version = self.actor.version().result()
        if version != self._version:
            self._version = None
            self.run(version)
            self._version = version
        return Future(lambda: None)

    def begin(self, version: int) -> None:
        self.engines.begin_update(version).result()

    def end(self) -> None:
        self.engines.end_update().result()

    def transfer(self, version: int) -> None:
        """Round by round: the actor packs the next one while the engines take the one before."""
        posted = self.actor.post(0) if self._rounds else None
        for at in range(self._rounds):
            assert posted is not None
            tickets = {
                (sender, receiver): ticket
                for sender, left in enumerate(posted.result())
                for receiver, ticket in left.items()
            }
            fetched = self.engines.fetch(at, tickets)
            if at + 1 < self._rounds:
                posted = self.actor.post(at + 1)
            fetched.result()
        self.actor.forget_messages().result()

    def differing(self) -> list[str]:
        every: list[tuple[Sums, Sums]] = [(sent, {}) for sent in self.actor.sums_sent().result()]
        every += [({}, held) for held in self.engines.sums_held().result()]
        return compare(every)
