"""Engines in pools of their own that work on while the controller waits for something else.

An engine generates only within a call, and between two calls it must be able to take newer weights.
So each replica is asked again and again to `advance` for a moment, and always has the next such
call waiting. What it has completed goes from its reply to the data's worker (landed.py):

    controller   update of step s ......... waits ......... its result
    replica 0    advance advance advance advance advance advance ...
    replica 1    advance    advance    advance    advance    adva...
    data           land       land   land     land         land

There are no threads: replies are taken wherever the controller waits for a reply (Outbox.wait). A
replica without work is not asked before new rows are opened. A step whose rows have all landed is
collected; no call is sent that would have to wait for rows under way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import attrs

from hybridflow.core.errors import HybridFlowError
from hybridflow.core.groups.group import Future, WorkerGroup, replies_of
from hybridflow.core.groups.outbox import Outbox, PendingReply
from hybridflow.core.rollouts.separate import SeparateRollout
from hybridflow.core.values.batch import Batch
from hybridflow.core.workers.carried import BUSY

MOMENT_S = 0.1
"""How long a call should take: weights wait for two of them at most."""
WAITING = 2
"""Calls that a replica has at once, so that it need not wait for the controller."""
MOST = 4096
"""The most steps of an engine in a call."""


class Asked(NamedTuple):
    """A call under way."""

    rows: Batch
    """The rows that are complete after it."""
    reply: PendingReply
    steps: int
    work: int
    """The replica's `work` when it was sent."""


@attrs.define(eq=False)
class Replica:
    """One engine's ranks, and their calls under way."""

    role: str
    rollout: SeparateRollout
    ranks: Sequence[int]
    overlaps: bool
    """Whether it works while the controller waits."""
    most: int = 1
    """Steps of the engine in the next call."""
    busy: bool = False
    """Whether it has work, as far as is known."""
    work: int = 0
    """How often it was given work."""
    calls: deque[Asked] = attrs.field(factory=deque)

    def wake(self) -> None:
        """Note that it has work."""
        self.busy = True
        self.work += 1
        if not self.overlaps:
            self.most = 0  # what a checkpoint has complete comes first, and needs no step

    def ask(self) -> None:
        """Have it work on, while it has work."""
        while self.busy and len(self.calls) < (WAITING if self.overlaps else 1):
            rows = self.rollout.engines.call_on(self.ranks, "advance", self.most)
            [reply] = replies_of(rows)
            self.calls.append(Asked(rows, reply, self.most, self.work))

    @property
    def awaited(self) -> Any:
        """The reference of a reply to its oldest call; None where it has none."""
        return self.calls[0].reply.reference if self.calls else None

    def take(self) -> Batch:
        """Take the reply to its oldest call: the rows that are complete."""
        rows, reply, steps, work = self.calls.popleft()
        busy = rows.metrics.maxima[BUSY] > 0
        # A call that was sent before the last work came does not know of it.
        self.busy = busy or work < self.work
        seconds = reply.call.ended - reply.call.started
        if not self.overlaps:
            self.most = 1  # no step more than the rows need that are waited for
        elif busy and seconds > 0:
            self.most = int(min(max(steps * MOMENT_S / seconds, 1), 2 * steps, MOST))
        return rows


class Serving:
    """The replicas of a run's engines; core.groups.outbox.Outbox takes their replies."""

    def __init__(
        self,
        rollouts: Mapping[str, SeparateRollout],
        data: WorkerGroup,
        outbox: Outbox,
        overlaps: bool = True,
    ) -> None:
        """Begin with nothing to do.

        rollouts: by role. data: where responses land. overlaps: whether engines can work while the
        controller waits; otherwise they do where it waits for them alone.
        """
        self.rollouts = rollouts
        self.data = data
        self.outbox = outbox
        self.overlaps = overlaps
        self.replicas = [
            Replica(role, rollout, ranks, overlaps)
            for role, rollout in rollouts.items()
            for ranks in _replicas(rollout.engines)
        ]
        self._landings: dict[Any, tuple[SeparateRollout, Future]] = {}
        """The reference of a reply -> the landing that it tells of."""

    @property
    def references(self) -> list[Any]:
        """The references of the replies that are waited for."""
        asked = [replica.awaited for replica in self.replicas if replica.calls]
        return [*self._landings, *asked]

    def arrived(self, reference: Any) -> None:
        """Take a reply: have its replica work on, or its step collected that is complete."""
        if (landing := self._landings.pop(reference, None)) is not None:
            rollout, landed = landing
            before = set(rollout.awaited)
            rollout.land(landed.result())
            for step in sorted(before - rollout.awaited.keys()):
                if self._is_complete(step):
                    self.outbox.free(step)
            return
        replica = next(one for one in self.replicas if one.awaited == reference)
        self._take(replica)
        if self.overlaps:
            replica.ask()

    def _take(self, replica: Replica) -> None:
        rows = replica.take()
        if rows.rows:
            landed = self.data.land(replica.role, rows)
            [reply] = landed.replies
            self._landings[reply.reference] = (replica.rollout, landed)

    def wake(self) -> None:
        """Have all replicas work: rows were opened, or the weights are there."""
        for replica in self.replicas:
            replica.wake()
            if self.overlaps:
                replica.ask()
        self.outbox.serving = self if self.overlaps else None

    def complete(self, step: int) -> None:
        """Wait until all rows of a step have landed."""
        self.wake()
        serving, self.outbox.serving = self.outbox.serving, None
        try:
            while not self._is_complete(step):
                if not self.references:
                    for replica in self.replicas:
                        replica.ask()
                if not (references := self.references):
                    raise HybridFlowError(
                        f"rows of step {step} are not complete, and no engine has work; this is an "
                        "error in hybridflow"
                    )
                self.arrived(self.data.runtime.first(references))
        finally:
            self.outbox.serving = serving

    def _is_complete(self, step: int) -> bool:
        return not any(step in rollout.awaited for rollout in self.rollouts.values())

    def pause(self) -> None:
        """Wait until no replica works: their weights are about to change, or other calls come."""
        self.outbox.serving = None
        for replica in self.replicas:
            while replica.calls:
                self._take(replica)


def _replicas(group: WorkerGroup) -> list[list[int]]:
    """Return the ranks of each replica of a group's engines."""
    assert group.generation is not None
    ranks: dict[int, list[int]] = {}
    for rank, replica in group.generation.replica_of.items():
        ranks.setdefault(replica, []).append(rank)
    return [ranks[replica] for replica in sorted(ranks)]
