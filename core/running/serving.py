"""Engines in pools of their own that work on while the controller waits for something else.

An engine generates only within a call, and between two calls it must be able to take newer weights.
So each replica is asked again and again to `advance` for a moment, and always has the next such
call waiting:

    controller   update of step s ......... waits ......... its result
    replica 0    advance advance advance advance advance advance ...
    replica 1    advance    advance    advance    advance    adva...

There are no threads: replies are taken wherever the controller waits for a reply (Outbox.wait). A
replica without work is not asked before new rows are opened.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import attrs

from hybridflow.core.groups.group import Future, WorkerGroup
from hybridflow.core.groups.outbox import Outbox

MOMENT_S = 0.1
"""How long a call should take: weights wait for two of them at most."""
WAITING = 2
"""Calls that a replica has at once, so that it need not wait for the controller."""
MOST = 4096
"""The most steps of an engine in a call."""


class Asked(NamedTuple):
    """A call under way."""

    call: Future
    steps: int
    work: int
    """The replica's `work` when it was sent."""


@attrs.define(eq=False)
class Replica:
    """One engine's ranks, and their calls under way."""

    group: WorkerGroup
    ranks: Sequence[int]
    most: int = 1
    """Steps of the engine in the next call."""
    busy: bool = False
    """Whether it has work, as far as is known."""
    work: int = 0
    """How often it was given work."""
    calls: deque[Asked] = attrs.field(factory=deque)
    complete: frozenset[int] = frozenset()
    """The steps whose rows are complete."""

    def ask(self) -> None:
        """Have it work on, while it has work."""
        while self.busy and len(self.calls) < WAITING:
            call = self.group.call_on(self.ranks, "advance", self.most)
            self.calls.append(Asked(call, self.most, self.work))

    @property
    def awaited(self) -> Any:
        """The reference of a reply to its oldest call; None where it has none."""
        return self.calls[0].call.replies[0].reference if self.calls else None

    def take(self) -> None:
        """Take the reply to its oldest call."""
        call, steps, work = self.calls.popleft()
        answers = call.result()
        busy = any(busy for busy, _ in answers)
        # A call that was sent before the last work came does not know of it.
        self.busy = busy or work < self.work
        self.complete = frozenset(answers[0][1])
        # A rank that waits for its peers takes as long as they do.
        seconds = max(reply.call.ended - reply.call.started for reply in call.replies)
        if busy and seconds > 0:
            self.most = int(min(max(steps * MOMENT_S / seconds, 1), 2 * steps, MOST))


class Serving:
    """The replicas of a run's engines; core.groups.outbox.Outbox takes their replies."""

    def __init__(self, groups: Iterable[WorkerGroup], outbox: Outbox) -> None:
        self.replicas = [Replica(group, ranks) for group in groups for ranks in _replicas(group)]
        self.outbox = outbox

    @property
    def references(self) -> list[Any]:
        """The references of the replies that are waited for, one for each replica."""
        return [replica.awaited for replica in self.replicas if replica.calls]

    def arrived(self, reference: Any) -> None:
        """Take a reply, have its replica work on, and send for responses that are complete."""
        replica = next(one for one in self.replicas if one.awaited == reference)
        replica.take()
        replica.ask()
        for step in sorted(frozenset.intersection(*(r.complete for r in self.replicas))):
            self.outbox.free(step)

    def wake(self) -> None:
        """Have all replicas work: rows were opened, or the weights are there."""
        for replica in self.replicas:
            replica.busy = True
            replica.work += 1
            replica.ask()
        self.outbox.serving = self

    def pause(self) -> None:
        """Wait until no replica works: their weights are about to change, or other calls come."""
        self.outbox.serving = None
        for replica in self.replicas:
            while replica.calls:
                replica.take()


def _replicas(group: WorkerGroup) -> list[list[int]]:
    """Return the ranks of each replica of a group's engines."""
    assert group.generation is not None
    ranks: dict[int, list[int]] = {}
    for rank, replica in group.generation.replica_of.items():
        ranks.setdefault(replica, []).append(rank)
    return [ranks[replica] for replica in sorted(ranks)]
