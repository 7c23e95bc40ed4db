"""Weights from an actor's pool to engines in a pool of their own.

They are sent in the plan's rounds, whose tickets pass through the controller. The actor packs a
round while the engines fetch the one before:

    actor        post(0)   post(1)   post(2)   ...
                    |         |         |          tickets
                    +---+     +---+     +---+
                        v         v         v
    engines          fetch(0)  fetch(1)  fetch(2)  ...
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs
import numpy as np
import torch

from hybridflow.core.contracts.rollout import SamplingParams
from hybridflow.core.groups.group import Future, WorkerGroup
from hybridflow.core.job.sections import SyncConfig
from hybridflow.core.resharding.plan import plan_reshard
from hybridflow.core.rollouts.checksums import Proofs, Sums, compare
from hybridflow.core.rollouts.replica import Given, Replica
from hybridflow.core.rollouts.weight_sync import SyncCost, WeightSync
from hybridflow.core.values.batch import Batch
from hybridflow.core.values.weights import WeightLayout


class SeparateRollout(WeightSync):
    """The actor's group and its engines' group, on the controller.

    It generates with the actor's newest weights; with those of the last sync, where steps are
    generated ahead.
    """

    def __init__(self, actor: WorkerGroup, engines: WorkerGroup, sync: SyncConfig):
        super().__init__(sync.verify)
        self.ahead = False
        """Whether `sync` alone gives the engines newer weights, not each `generate`."""
        self.actor = actor
        self.engines = engines
        assert engines.generation is not None
        ranks: dict[int, list[int]] = {}
        for rank, replica in engines.generation.replica_of.items():
            ranks.setdefault(replica, []).append(rank)
        self.replicas = [Replica(engines, ranks[number]) for number in sorted(ranks)]
        self.awaited: dict[int, set[int]] = {}
        """Step -> the samples that it has opened and that have not landed yet."""
        self._connection: tuple[WeightLayout, WeightLayout, int, list[str]] | None = None
        """What the engines' ranks were connected by."""
        self.bucket_bytes = sync.bucket_bytes
        self._sent: list[Future] = []
        """Calls of the present update that nobody has waited for yet."""
        self._rounds = 0

    def connect(self) -> SyncCost:
        """Plan the transfer and connect both sides; return the cost of a sync.

        Raises ReshardError when the two layouts do not match.
        """
        source = self.actor.weight_layout().result()
        engine_layout = self._engine_layout()
        nodes = self.actor.node().result() + self.engines.node().result()

        # The engines' ranks come after the actor's. Planning here raises a problem once, not on
        # every rank.
        first = self.actor.layout.world
        target = engine_layout.renumbered(lambda rank: rank + first)
        plan = plan_reshard(source, target, self.bucket_bytes)

        # Both sides connect at the same time.
        self._connection = (source, target, first, nodes)
        calls = [
            self.actor.connect(source, target, 0, nodes),
            self.engines.connect(*self._connection),
        ]
        connected = [call.result() for call in calls]
        of_actor, _ = connected  # one entry per rank each, and all of them are equal
        self._rounds, transport = of_actor[0]
        return SyncCost(
            max(plan.bytes_received.values()),
            max(plan.peak_bytes.values()),
            self._rounds,
            transport,
        )

    def _engine_layout(self) -> WeightLayout:
        """Return which boxes the engines hold, by their ranks in the pool."""
        groups = self.engines.pool.spec.process_groups
        told = [self.engines.call_on(ranks[:1], "weight_layout") for ranks in groups]
        layouts: list[WeightLayout] = [one.result() for one in told]
        held = {}
        for ranks, layout in zip(groups, layouts, strict=True):
            for place, rank in enumerate(ranks):
                held[rank] = layout.held[place]
        return attrs.evolve(layouts[0], held=held)

    def open(self, batch: Batch, sampling: SamplingParams, seed: int, step: int) -> None:
        """Have the engines generate these rows beside others; step: the one that trains on them."""
        samples = np.asarray(torch.as_tensor(batch["sample_id"].values))
        if len(samples):
            self.awaited.setdefault(step, set()).update(samples.tolist())
            self._share(Given(batch, samples, sampling, seed))

    def _share(self, given: Given) -> None:
        """Give rows to the replicas, each a part; where none is alive, for the time when one is."""
        replicas = [one for one in self.replicas if one.alive] or self.replicas
        for replica, part in zip(
            replicas, np.array_split(np.arange(len(given.samples)), len(replicas)), strict=True
        ):
            if len(part):
                replica.give(given.only(part))

    def land(self, samples: Iterable[int]) -> None:
        """Note that the responses of these samples have left the engines."""
        gone = set(samples)
        for step, awaited in list(self.awaited.items()):
            awaited -= gone
            if not awaited:
                del self.awaited[step]
        for replica in self.replicas:
            replica.keep(self._awaited)

    @property
    def alive(self) -> bool:
        """Whether there is an engine that can generate."""
        return any(replica.alive for replica in self.replicas)

    @property
    def _awaited(self) -> set[int]:
        return set().union(*self.awaited.values())

    def lose(self, replica: Replica) -> Future:
        """Have others generate what a replica has not completed, and another take its place.

        Return the build of that one's engine.
        """
        replica.alive = False
        for given in replica.take_back(self._awaited):
            self._share(given)
        return replica.renew()

    def regain(self, replica: Replica) -> None:
        """Connect a replica that has taken another's place; its rows wait for its weights."""
        assert self._connection is not None
        self.engines.call_on(replica.ranks, "connect", *self._connection).result()
        self.proven = 0
        self.forget()

    def resume(self) -> None:
        """Give the replicas that have weights again the rows that wait for them."""
        for replica in self.replicas:
            if not replica.alive:
                replica.alive = True
                for given in replica.take_back(self._awaited):
                    replica.give(given)

    def generate(self, batch: Batch, sampling: SamplingParams, seed: int) -> Batch:
        """Sync the weights if there are newer ones, then generate (see RolloutWorker.generate)."""
        if not self.ahead:
            self.sync()
        return self.engines.generate(batch, sampling, seed)

    def episodes(self, batch: Batch, sampling: SamplingParams, seed: int) -> Batch:
        """Sync the weights if there are newer ones, then run episodes."""
        if not self.ahead:
            self.sync()
        return self.engines.episodes(batch, sampling, seed)

    def sync(self) -> Future:
        """Send the weights to the engines if they are newer; the sync has ended on return."""
        version = self.actor.version().result()
        if version != self.version:
            self.run(version)
        return Future(lambda: None)

    def begin(self, version: int) -> None:
        """Begin the update: every engine refuses to generate until `end`."""
        self._sent = [self.engines.begin_update(version)]

    def expect(self, part: int | None) -> None:
        self._sent.append(self.engines.expect(part))

    def end(self) -> None:
        self.engines.end_update().result()

    def transfer(self, version: int) -> None:
        """Move round by round: the actor packs the next one while the engines fetch."""
        posted = self.actor.post(0) if self._rounds else None
        for sent in self._sent:
            sent.result()
        for number in range(self._rounds):
            assert posted is not None
            # Tickets of all ranks; each engine takes its own.
            tickets = {}
            for sender, sent in enumerate(posted.result()):
                for receiver, ticket in sent.items():
                    tickets[sender, receiver] = ticket

            fetched = self.engines.fetch(number, tickets)
            if number + 1 < self._rounds:
                posted = self.actor.post(number + 1)
            fetched.result()
        self._sent = [self.actor.forget_messages()]

    def differing(self, version: int, part: int | None) -> dict[str, str]:
        """Return `compare` over the ranks of both groups, computed by the controller."""
        all_sent = self.actor.sums_sent(part)
        all_held = self.engines.proof()
        every: list[tuple[Sums, Proofs]] = [(sent, {}) for sent in all_sent.result()]
        every += [({}, held) for held in all_held.result()]
        for sent in self._sent:
            sent.result()
        return compare(version, every)
