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

So nobody waits behind an engine whose process ends. The other replicas generate what it had not
completed, another process takes its place, and gets weights with the others, at the end of the
step: lost is what it had of responses that were not complete.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import attrs

from hybridflow.core.contracts.runtime import Process
from hybridflow.core.errors import HybridFlowError, WorkerError
from hybridflow.core.groups.group import Future, WorkerGroup, replies_of
from hybridflow.core.groups.outbox import Outbox, PendingReply
from hybridflow.core.rollouts.replica import Replica
from hybridflow.core.rollouts.separate import SeparateRollout
from hybridflow.core.values.batch import Batch
from hybridflow.core.workers.carried import BUSY

MOMENT_S = 0.15
"""How long a call should take: weights wait for two of them at most."""
WAITING = 2
"""Calls that a replica has at once, so that it need not wait for the controller."""
MOST = 4096
"""The most steps of an engine in a call."""
MOST_LOSSES = 3
"""How often an engine may be lost before it completes a response."""


class Asked(NamedTuple):
    """A call under way."""

    rows: Batch
    """The rows that are complete after it."""
    reply: PendingReply
    steps: int
    work: int
    """The replica's `work` when it was sent."""
    opened: Sequence[Future]
    """The calls before it that have given rows to the engine."""


@attrs.define(eq=False)
class Served:
    """A replica, and its calls under way."""

    role: str
    rollout: SeparateRollout
    replica: Replica
    overlaps: bool
    """Whether it works while the controller waits."""
    most: int = 1
    """Steps of the engine in the next call."""
    busy: bool = False
    """Whether it has work, as far as is known."""
    work: int = 0
    """How often it was given work."""
    calls: deque[Asked] = attrs.field(factory=deque)
    building: Future | None = None
    """The build of an engine that takes the place of one that was lost, and has no weights yet."""
    losses: int = 0
    """How often it was lost since it last completed a response."""

    def wake(self) -> None:
        """Note that it has work."""
        self.busy = True
        self.work += 1
        if not self.overlaps:
            self.most = 0  # what a checkpoint has complete comes first, and needs no step

    def ask(self) -> None:
        """Have it work on, while it is alive and has work."""
        at_once = WAITING if self.overlaps else 1
        while self.replica.alive and self.busy and len(self.calls) < at_once:
            rows = self.replica.group.call_on(self.replica.ranks, "advance", self.most)
            [reply] = replies_of(rows)
            opened, self.replica.unread = self.replica.unread, []
            self.calls.append(Asked(rows, reply, self.most, self.work, opened))

    @property
    def awaited(self) -> Any:
        """The reference of a reply to its oldest call; None where it has none."""
        return self.calls[0].reply.reference if self.calls else None

    @property
    def processes(self) -> list[Process]:
        """Those of its ranks."""
        return [self.replica.group.pool.processes[rank] for rank in self.replica.ranks]

    def take(self) -> Batch:
        """Take the reply to its oldest call: the rows that are complete."""
        rows, reply, steps, work, opened = self.calls.popleft()
        for one in opened:
            one.result()  # a row that could not be opened would never be complete
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
        replaces: bool = False,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Begin with nothing to do.

        rollouts: by role. data: where responses land. overlaps: whether engines can work while the
        controller waits; otherwise they do where it waits for them alone. replaces: whether
        processes can take the places of those that have ended; only engines are replaced that are
        alone in their pool, each with a torch.distributed group of its own. say: is told of
        replicas that are lost.
        """
        self.rollouts = rollouts
        self.data = data
        self.outbox = outbox
        self.overlaps = overlaps
        self.say = say
        self.replicas = [
            Served(role, rollout, replica, overlaps)
            for role, rollout in rollouts.items()
            for replica in rollout.replicas
        ]
        self._working = False
        """Whether replicas are to work."""
        self._landings: dict[Any, tuple[Served, Future]] = {}
        """The reference of a reply -> the landing that it tells of."""
        for served in self.replicas:
            for process in served.processes:
                process.expendable = replaces and process.pool.groups is not None

    @property
    def references(self) -> list[Any]:
        """The references of the replies that are waited for."""
        asked = [replica.awaited for replica in self.replicas if replica.calls]
        return [*self._landings, *asked]

    def arrived(self, reference: Any) -> None:
        """Take a reply: have its replica work on, or its step collected that is complete."""
        if (landing := self._landings.pop(reference, None)) is not None:
            served, landed = landing
            with self._losing(served):
                self._land(served, landed.result())
            return
        served = next(one for one in self.replicas if one.awaited == reference)
        self._take(served)
        if self.overlaps:
            served.ask()

    def _take(self, served: Served) -> None:
        """Take the reply to a replica's oldest call, and send what is complete to the data."""
        with self._losing(served):
            rows = served.take()
            if rows.rows:
                landed = self.data.land(served.role, rows)
                [reply] = landed.replies
                self._landings[reply.reference] = (served, landed)

    def _land(self, served: Served, samples: Sequence[int]) -> None:
        rollout = served.rollout
        before = set(rollout.awaited)
        rollout.land(samples)
        served.losses = 0
        for step in sorted(before - rollout.awaited.keys()):
            if self._is_complete(step):
                self.outbox.free(step)

    # --- replicas that are lost ---

    @contextmanager
    def _losing(self, served: Served) -> Iterator[None]:
        """Replace a replica if the body fails for its end."""
        try:
            yield
        except WorkerError as error:
            if not self._has_ended(served):
                raise
            self._lose(served, error)

    def _has_ended(self, served: Served) -> bool:
        mine = served.processes
        return all(one.expendable for one in mine) and bool(self.data.runtime.ended(mine))

    def find_lost(self, error: WorkerError) -> bool:
        """Replace the replicas whose processes have ended; return whether there are any."""
        lost = [served for served in self.replicas if self._has_ended(served)]
        for served in lost:
            self._lose(served, error)
        return bool(lost)

    def _lose(self, served: Served, error: WorkerError) -> None:
        served.calls.clear()
        for reference, (other, landed) in list(self._landings.items()):
            if other is served:
                del self._landings[reference]
                with suppress(WorkerError):  # what it had may be gone with it
                    self._land(served, landed.result())
        served.losses += 1
        if served.losses > MOST_LOSSES:
            raise error
        ranks = ", ".join(str(rank) for rank in served.replica.ranks)
        ranks = f"rank{'s' if len(served.replica.ranks) > 1 else ''} {ranks}"
        pool = served.replica.group.pool.spec.name
        self.say(
            f"the engine of {served.role} on {ranks} of pool {pool!r} is gone: another one "
            "starts, and others generate what it had not completed"
        )
        served.building = served.rollout.lose(served.replica)
        if self._working:
            self._wake()

    def regain(self) -> None:
        """Wait for the engines that start in the place of lost ones; they have no weights yet."""
        for served in self.replicas:
            while served.building is not None:
                with self._losing(served):
                    served.building.result()
                    served.rollout.regain(served.replica)
                    served.building = None

    def resume(self) -> None:
        """Give those engines the rows that wait for them: they have weights."""
        for rollout in self.rollouts.values():
            rollout.resume()

    def unfinished(self, role: str) -> list[Batch]:
        """Return what the engines of a role have of their open rows, for a checkpoint."""
        found = []
        for served in self.replicas:
            if served.role == role and served.replica.alive:
                with self._losing(served):
                    rows = served.replica.group.call_on(served.replica.ranks, "unfinished")
                    _ = rows.metrics  # waits
                    found.append(rows)
        return found

    def wake(self) -> None:
        """Have all replicas work: rows were opened, or the weights are there."""
        self._working = True
        self._wake()
        self.outbox.serving = self if self.overlaps else None

    def _wake(self) -> None:
        for served in self.replicas:
            served.wake()
            if self.overlaps:
                served.ask()

    def complete(self, step: int) -> None:
        """Wait until all rows of a step have landed."""
        self.wake()
        serving, self.outbox.serving = self.outbox.serving, None
        try:
            while not self._is_complete(step):
                if any(step in one.awaited and not one.alive for one in self.rollouts.values()):
                    self._restore()
                if not self.references:
                    for served in self.replicas:
                        served.ask()
                if not (references := self.references):
                    raise HybridFlowError(
                        f"rows of step {step} are not complete, and no engine has work; this is an "
                        "error in hybridflow"
                    )
                self.arrived(self.data.runtime.first(references))
        finally:
            self.outbox.serving = serving

    def _restore(self) -> None:
        """Give engines in the place of lost ones the present weights, for the step's own rows.

        The trainer waits for these, so that its weights are those of the step before.
        """
        self.regain()
        for rollout in self.rollouts.values():
            rollout.sync()
        self.resume()
        self._wake()

    def _is_complete(self, step: int) -> bool:
        return not any(step in rollout.awaited for rollout in self.rollouts.values())

    def pause(self) -> None:
        """Wait until no replica works: their weights are about to change, or other calls come."""
        self.outbox.serving = None
        self._working = False
        for served in self.replicas:
            while served.calls:
                self._take(served)
