"""Calls under way; those of a step that is written ahead are held back until its turn.

With run.max_staleness the algorithm writes step s + 1 while step s is trained. Every call is
encoded as it is made; what differs is when it is submitted:

    to a pool in which nothing is trained,    at once: draws, generations, frozen models
    or of a method that is `early`, with
    inputs that are there or under way
    such a call of a method that is `late`,   held until it is said to be free, or until it is read:
    and those that need its result            responses that engines are still at work on
    any other                                 held, and submitted in order at the step's turn

Several steps may be written before the first of them has its turn. A reply that is read while its
call is held, and is not free, brings about the turn of its step, and of those before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import nan
from typing import Any, Protocol as Typing

import attrs

from hybridflow.core.contracts.runtime import Label, Message, Process, Runtime
from hybridflow.core.contracts.worker import Part
from hybridflow.core.errors import HybridFlowError
from hybridflow.core.groups.host import Reply, read_reply
from hybridflow.core.processes.page import doing


@attrs.define(eq=False)
class Call:
    """A call of one rank, for those who look at times. Times are seconds since the epoch."""

    pool: str
    rank: int
    role: str
    method: str
    sent: float
    """When the controller sent it."""
    after: tuple[Call, ...] = ()
    """The calls whose results it was given before they were there."""
    started: float = nan
    """When the rank began, by the clock of its node; nan before the reply is read."""
    ended: float = nan
    parts: tuple[Part, ...] = ()
    """What it consisted of, as far as the worker tells."""
    read: tuple[float, float] = (nan, nan)
    """When the controller began to wait for the reply, and when it had it."""
    step: int = 0
    """The step that made it."""


@attrs.define(eq=False)
class PendingReply:
    """One rank's reply, which is fetched at most once."""

    runtime: Runtime
    outbox: Outbox
    call: Call
    watch: Callable[[Call], None] | None
    reference: Any = None
    """The runtime's reference to the reply; None while the call is held."""
    _reply: Reply | None = None

    @property
    def held(self) -> bool:
        """Whether the call waits for the turn of its step."""
        return self.reference is None

    def read(self) -> Reply:
        """Wait for the reply. Raises the rank's WorkerError if the call failed there."""
        if self._reply is None:
            if self.held:
                self.outbox.demand(self.call)
            began = time.time()
            call = self.call
            with doing(f"waits for {call.role}/{call.method} of rank {call.rank}"):
                blob, handles, failed = self.outbox.wait(self.runtime, self.reference)
            self.runtime.traffic.received += len(blob)

            # A rank whose peer died fails too; the death is the error to report.
            if failed:
                self.runtime.check_alive()

            self._reply = read_reply(blob, handles, failed, _Counted(self.runtime))
            self.call.started, self.call.ended = self._reply.started, self._reply.ended
            self.call.parts = self._reply.parts
            self.call.read = (began, time.time())
            if self.watch is not None:
                self.watch(self.call)

        # A failed call raises each time that it is read.
        if self._reply.error is not None:
            raise self._reply.error
        return self._reply

    def value(self) -> Any:
        """Wait for the reply and return its value. Raises as `read` does."""
        return self.read().value


@attrs.frozen(eq=False)
class Outgoing:
    """An encoded call of one rank, to be submitted."""

    process: Process
    blob: bytes
    handles: Sequence[Any]
    """Handles of the blocks in the store that the call reads."""
    inputs: Sequence[PendingReply]
    """Replies that must arrive before the call can run."""
    label: Label
    reply: PendingReply
    """Gets the reference to the call's own reply."""

    def submit(self) -> None:
        reply = self.reply
        reply.runtime.traffic.sent += len(self.blob)
        reply.call.sent = time.time()
        references = [before.reference for before in self.inputs]
        message = Message(self.blob, self.handles, references)
        reply.reference = self.process.submit(message, self.label)


@attrs.frozen
class _Held:
    """The messages of a call that is held, one per rank."""

    calls: Sequence[Outgoing]
    free: bool
    """Whether it need not wait for the turn of its step."""

    @property
    def step(self) -> int:
        return self.calls[0].reply.call.step

    def submit(self) -> None:
        for call in self.calls:
            call.submit()


class WorksMeanwhile(Typing):
    """Who works while the controller waits."""

    @property
    def references(self) -> Sequence[Any]:
        """The references of replies that it waits for."""

    def arrived(self, reference: Any) -> None:
        """Take one of these replies, which is there."""


@attrs.frozen
class _Counted:
    """The runtime's store, which counts the bytes that the controller fetches."""

    runtime: Runtime

    def put(self, block: list) -> Any:
        return self.runtime.put(block)

    def get(self, handle: Any) -> list:
        block = self.runtime.get(handle)
        self.runtime.traffic.fetched += sum(array.nbytes for array in block)
        return block


class Outbox:
    """Where all groups of a session submit their calls."""

    def __init__(self, ahead: Collection[str] = ()):
        """ahead: the pools in which nothing is trained."""
        self.ahead = frozenset(ahead)
        self.step = 0
        """The step that calls are made for."""
        self.serving: WorksMeanwhile | None = None
        """Who works while a reply is waited for."""
        self._held: list[_Held] = []
        self._turn: Callable[[Call], None] | None = None
        self._writing = 0
        """The step whose calls are held in the present body of `holding`."""
        self._released = 0
        """The last step that has had its turn."""

    @property
    def holds(self) -> bool:
        """Whether calls are made that may have to wait."""
        return self._turn is not None

    def post(
        self, pool: str, calls: Iterable[Outgoing], early: bool = False, late: bool = False
    ) -> None:
        """Submit the messages of one call, one per rank; or hold all of them.

        early: the call may be submitted to any pool. late: it is held even so.
        """
        # All ranks or none: they must get their calls in the same order. Encoding may read a reply,
        # and so bring about the turn.
        if self.holds:
            calls = list(calls)
            free = early or pool in self.ahead
            held = any(one.held for call in calls for one in call.inputs)
            if self.holds and (late or held or not free):
                self._held.append(_Held(calls, free))
                return
        for call in calls:
            call.submit()

    def wait(self, runtime: Runtime, reference: Any) -> tuple[bytes, Sequence[Any], bool]:
        """Wait for a reply, while others are served; return it as Runtime.wait does."""
        while (serving := self.serving) is not None and serving.references:
            first = runtime.first([reference, *serving.references])
            if first == reference:
                break
            # What it reads has arrived.
            self.serving = None
            try:
                serving.arrived(first)
            finally:
                self.serving = serving
        return runtime.wait(reference)

    @contextmanager
    def holding(self, turn: Callable[[Call], None]) -> Iterator[None]:
        """Hold the calls of the present step in the body, until they are released.

        turn: called with a held call whose reply is read; it releases the step of that call.
        """
        self._turn = turn
        self._writing = self.step
        try:
            yield
        finally:
            self._turn = None

    def demand(self, call: Call) -> None:
        """Bring about the turn of the step whose held call's reply is read."""
        turn, self._turn = self._turn, None
        if turn is None:
            raise HybridFlowError(
                f"the result of {call.role}.{call.method} is read, and step {call.step}, which "
                "made the call, has not had its turn"
            )
        turn(call)
        # The call may have been free, or one of an earlier step.
        if self._released < self._writing:
            self._turn = turn

    def has(self, call: Call) -> bool:
        """Return whether a call is held."""
        return any(one.reply.call is call for held in self._held for one in held.calls)

    def free(self, step: int) -> None:
        """Submit the held calls of a step that need not wait for its turn."""
        kept = []
        for held in self._held:
            inputs = (one for call in held.calls for one in call.inputs)
            if held.free and held.step == step and not any(one.held for one in inputs):
                held.submit()
            else:
                kept.append(held)
        self._held = kept

    def release(self, step: int) -> None:
        """Submit the held calls of the steps up to this one, in the order they were made in."""
        self._released = step
        if step >= self._writing:
            self._turn = None
        due = [held for held in self._held if held.step <= step]
        self._held = self._held[len(due) :]
        for held in due:
            held.submit()

    def drop(self) -> None:
        """Forget the held calls: their steps will not have their turn."""
        self._held = []
