"""Seconds of steps that overlap (run.max_staleness), by a simulation of their events.

Each engine decodes the sequences that it was given, older steps first, up to as many at once as it
has places for; a decoding step with n of them takes a + b n seconds and makes a token of each. What
is written of the following steps is open beside the present one:

    engines     steps s, s + 1, ..., s + k in the order of their places ...
    trainer     waits for the last sequence of step s | trains it | weights | waits for s + 1 ...

With newer weights sequences go on where they are, after their tokens have been read anew. Where the
engines take turns with the training they stand still while it lasts.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence

import attrs
import numpy as np

SETTLED = 2
"""Steps are counted from so many after the bound on, when as much is carried over as ever."""


@attrs.frozen
class Engines:
    """The engines of a role."""

    replicas: int
    places: int
    """Sequences that each decodes at once."""
    step_s: float
    """a: seconds of a decoding step, beside what each sequence takes."""
    sequence_s: float = 0.0
    """b: seconds of a decoding step for each sequence."""
    read_s: float = 0.0
    """Seconds in which an engine reads a token of a prompt, or of what was made of a sequence."""


@attrs.frozen
class Timing:
    """Seconds of a step whose steps overlap."""

    step: float
    """From one step's end to the next one's, the mean."""
    engines_busy: float
    """Share of the time in which an engine works, mean over the engines."""
    trainer_busy: float
    """Share of the time in which the trainer works; the rest it waits for sequences or weights."""


class _Replica:
    """One engine. Its clock counts decoding steps: a sequence ends at a known time of it."""

    def __init__(self, engines: Engines):
        self.engines = engines
        self.now = 0.0
        self.busy = 0.0
        self._clock = 0.0
        self._waiting: deque[tuple[int, int]] = deque()
        self._running: list[tuple[float, int, float]] = []
        """A heap of (clock at its end, the step that it is of, clock at its begin)."""

    def open(self, step: int, lengths: Sequence[int], prompt: int) -> None:
        """Take sequences of a step, which come after those before."""
        self._waiting.extend((step, int(length)) for length in lengths)
        self._work(len(lengths) * prompt * self.engines.read_s)
        self._fill()

    def read_anew(self, prompt: int) -> None:
        """Read all running sequences, as their weights have changed."""
        tokens = sum(self._clock - begin + prompt for _, _, begin in self._running)
        self._work(tokens * self.engines.read_s)

    def _work(self, seconds: float) -> None:
        self.now += seconds
        self.busy += seconds

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self.engines.places:
            step, length = self._waiting.popleft()
            heapq.heappush(self._running, (self._clock + length, step, self._clock))

    @property
    def _rate(self) -> float:
        return self.engines.step_s + self.engines.sequence_s * len(self._running)

    @property
    def next_end(self) -> float:
        """When its next sequence ends; infinite without one."""
        if not self._running:
            return np.inf
        return self.now + (self._running[0][0] - self._clock) * self._rate

    def end_next(self) -> int:
        """Go on to the end of the next sequence; return the step that it is of."""
        self.until(self.next_end)
        self._clock, step, _ = heapq.heappop(self._running)
        self._fill()
        return step

    def until(self, time: float) -> None:
        """Go on to a time, before which no sequence ends."""
        if self._running and time > self.now:
            self._clock += (time - self.now) / self._rate
            self.busy += time - self.now
        self.now = max(self.now, time)


class _Steps:
    """All engines, and how many sequences of each open step have not ended."""

    def __init__(self, engines: Engines, prompt: int):
        self.prompt = prompt
        self.replicas = [_Replica(engines) for _ in range(engines.replicas)]
        self.left: dict[int, int] = {}
        self._ends: list[tuple[float, int]] = []
        """A heap of (when a replica's next sequence ends, the replica's number)."""

    def open(self, step: int, lengths: np.ndarray) -> None:
        self.left[step] = len(lengths)
        for replica, part in zip(
            self.replicas, np.array_split(lengths, len(self.replicas)), strict=True
        ):
            replica.open(step, part.tolist(), self.prompt)
        self._order()

    def _order(self) -> None:
        self._ends = [(one.next_end, number) for number, one in enumerate(self.replicas)]
        heapq.heapify(self._ends)

    def _end_next(self) -> float:
        """Go on to the end of the next sequence; return when that is."""
        time, number = self._ends[0]
        replica = self.replicas[number]
        self.left[replica.end_next()] -= 1
        heapq.heapreplace(self._ends, (replica.next_end, number))
        return time

    def until(self, time: float) -> None:
        """Go on to a time."""
        while self._ends[0][0] <= time:
            self._end_next()
        for replica in self.replicas:
            replica.until(time)

    def complete(self, step: int, now: float) -> float:
        """Go on until all sequences of a step have ended; return when that is."""
        while self.left[step]:
            now = max(now, self._end_next())
        self.until(now)
        return now

    def stand_still(self, now: float, read_anew: bool) -> None:
        """Go on at a time, without having worked since the last one."""
        for replica in self.replicas:
            replica.now = max(replica.now, now)
            if read_anew:
                replica.read_anew(self.prompt)
        self._order()


def simulate(
    engines: Engines,
    lengths: Callable[[int], np.ndarray],
    training_s: float,
    sync_s: float = 0.0,
    staleness: int = 0,
    apart: bool = True,
    whole: bool = False,
    prompt: int = 0,
    first: int | None = None,
    steps: int = 8,
) -> Timing:
    """Return the seconds of a step with engines in a pool of their own, or beside the training.

    lengths: tokens of each sequence of a step, by the step's number from 1. training_s: all else of
    a step than generation. sync_s: until the engines have newer weights. staleness:
    run.max_staleness. apart: whether engines work while the trainer does. whole: whether weights
    wait until what is under way is complete (run.in_flight = "no"). prompt: tokens of a prompt.
    first: steps that are not counted, at least one; by default until as much is carried over as
    ever. steps: those that are counted.
    """
    made = _Steps(engines, prompt)
    # With "no" the next step is opened at this one's turn, else all that the bound allows.
    opened = 1 if whole else 1 + staleness
    for step in range(1, opened + 1):
        made.open(step, lengths(step))
    now, trained = 0.0, 0.0
    since = (0.0, 0.0, 0.0)
    first = staleness + SETTLED if first is None else first
    for step in range(1, first + steps + 1):
        now = made.complete(step, now)
        if whole and staleness:
            opened += 1
            made.open(opened, lengths(opened))
        now += training_s
        trained += training_s
        if apart:
            made.until(now)
            if whole and staleness:
                now = made.complete(opened, now)
        now += sync_s
        made.stand_still(now, read_anew=not whole)
        if not (whole and staleness):
            opened += 1
            made.open(opened, lengths(opened))
        if step == first:
            since = (now, sum(one.busy for one in made.replicas), trained)
    passed = now - since[0]
    busy = (sum(one.busy for one in made.replicas) - since[1]) / len(made.replicas)
    return Timing(passed / steps, busy / passed, (trained - since[2]) / passed)
