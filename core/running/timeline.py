"""What each process did and when, by the processes' own clocks, and who waited for whom."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import attrs

from hybridflow.core.contracts.observer import Span
from hybridflow.core.groups.outbox import Call

CONTROLLER = "controller"
SHORT_S = 0.001
"""Waits and parts of calls that are shorter, in seconds, are left out."""
MOMENTS = ("advance", "land")
"""Calls that are moments of one piece of work (serving.py), and become one where they follow each
other."""
BETWEEN_S = 0.01
"""The most seconds between two moments."""


class Timeline:
    """The calls of every rank since the last `take`."""

    def __init__(self) -> None:
        self._calls: list[Call] = []
        self._last: dict[str, float] = {}
        """Process -> when its last call ended."""
        self._moments: dict[str, Call] = {}
        """Process -> the last of its moments."""

    def add(self, call: Call) -> None:
        """Add a call whose reply was read."""
        if call.method in MOMENTS:
            last = self._moments.get(_process(call))
            if last is not None and _goes_on(last, call):
                last.ended = call.ended
                return
            self._moments[_process(call)] = call
        self._calls.append(call)

    def take(self, step: int | None = None) -> Taken:
        """Return the calls so far of the steps up to `step` (None: all), and forget them."""
        self._moments = {}
        taken = [call for call in self._calls if step is None or call.step <= step]
        self._calls = [] if step is None else [call for call in self._calls if call.step > step]
        calls = sorted(taken, key=lambda call: call.started)
        spans: list[Span] = []
        for call in calls:
            process = _process(call)
            last = self._last.get(process, call.started)
            waited = max(call.started - last, 0.0)
            spans.append(
                Span(
                    process,
                    call.role,
                    call.method,
                    call.started,
                    call.ended - call.started,
                    waited if waited >= SHORT_S else 0.0,
                    _cause(call, last) if waited >= SHORT_S else "",
                )
            )
            spans += [
                Span(process, call.role, f"{call.method}/{name}", started, ended - started)
                for name, started, ended in call.parts
                if ended - started >= SHORT_S
            ]
            self._last[process] = max(last, call.ended)
        for call in calls:
            began, ended = call.read
            if ended - began >= SHORT_S:
                worked = _worked_longest(call, began, ended)
                cause = f"{worked.role}/{worked.method}@{_process(worked)}"
                waited = ended - began
                spans.append(Span(CONTROLLER, call.role, "wait", began, waited, 0.0, cause))
        for call in calls:
            call.after = ()  # else each call would keep all before it
        return Taken(_busiest(calls), spans)


@attrs.frozen
class Taken:
    """The times of a step."""

    phases: dict[str, float]
    """role/method -> seconds of the busiest rank."""
    spans: Sequence[Span]


def _goes_on(moment: Call, later: Call) -> bool:
    """Return whether two moments of one process are of one piece of work."""
    same = (moment.step, moment.role, moment.method) == (later.step, later.role, later.method)
    return same and 0 <= later.started - moment.ended <= BETWEEN_S


def _process(call: Call) -> str:
    return f"{call.pool}/{call.rank}"


def _worked_longest(call: Call, began: float, ended: float) -> Call:
    """Return which of a call and those that it needed took most of a stretch of time."""
    needed: list[Call] = [call]
    seen = {id(call)}
    for one in needed:  # it grows meanwhile
        for before in one.after:
            if id(before) not in seen:
                seen.add(id(before))
                needed.append(before)

    def overlap(one: Call) -> float:
        common = min(one.ended, ended) - max(one.started, began)
        return common if common > 0 else 0.0

    return max(needed, key=overlap)


def _cause(call: Call, since: float) -> str:
    """Return what a process waited for from `since` until it began a call.

    It is the last of the calls whose results this one needed, unless the controller sent it later.
    """
    ends = [before for before in call.after if before.ended > since]
    last = max(ends, key=lambda before: before.ended, default=None)
    if last is not None and last.ended >= call.sent:
        return f"{last.role}/{last.method}@{_process(last)}"
    return CONTROLLER


def _busiest(calls: Sequence[Call]) -> dict[str, float]:
    """Return role/method -> seconds of the busiest rank, for which the others wait."""
    busy: dict[tuple[str, str], float] = defaultdict(float)
    for call in calls:
        busy[f"{call.role}/{call.method}", _process(call)] += call.ended - call.started
    phases: dict[str, float] = {}
    for (phase, _), seconds in busy.items():
        phases[phase] = max(phases.get(phase, 0.0), seconds)
    return phases
