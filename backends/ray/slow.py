"""Calls that run much longer than those of their kind before, told while the controller waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import attrs

from hybridflow.core.contracts.runtime import Label

SLOW_S = 40.0
"""Calls that run for less, in seconds, are never told of."""
TIMES = 3.0
"""A call is told of that has run so many times the longest before, or its time when last told."""


@attrs.define
class _Running:
    """What a process works on."""

    reference: Any
    label: Label
    since: float
    """When it was first seen at work, by time.monotonic."""
    told_after: float
    """The seconds at work after which it is told of."""


class SlowCalls:
    """Looks at what the processes work on, and tells of what takes long."""

    def __init__(self, say: Callable[[str], None]):
        self.say = say
        self._running: dict[Hashable, _Running] = {}
        self._longest: dict[Label, float] = {}
        """Role and phase -> the longest time that such a call was seen at work."""

    def look(
        self, running: Iterable[tuple[Hashable, Any, Label]], where: Callable[[Any], str]
    ) -> None:
        """Tell of calls that have run for long.

        running: process, its call's reference and label. where: says where a process is.
        """
        now = time.monotonic()
        before, self._running = self._running, {}
        for process, reference, label in running:
            known = before.pop(process, None)
            if known is not None and known.reference == reference:
                self._running[process] = known
                continue
            if known is not None:
                self._ended(known, now)
            after = max(SLOW_S, TIMES * self._longest.get(label, 0.0))
            self._running[process] = _Running(reference, label, now, after)
        for known in before.values():
            self._ended(known, now)
        self._tell(now, where)

    def _ended(self, one: _Running, now: float) -> None:
        self._longest[one.label] = max(self._longest.get(one.label, 0.0), now - one.since)

    def _tell(self, now: float, where: Callable[[Any], str]) -> None:
        """Tell of all processes with one slow call in one line."""
        slow: dict[Label, list[tuple[Hashable, _Running]]] = {}
        for process, one in self._running.items():
            if now - one.since >= one.told_after:
                slow.setdefault(one.label, []).append((process, one))
        for label, found in slow.items():
            longest = self._longest.get(label)
            usual = "none was seen before"
            if longest is not None:
                usual = f"the longest before took {longest:.0f} s"
            seconds = max(now - one.since for _, one in found)
            places = ", ".join(where(process) for process, _ in found[:4])
            more = f" and {len(found) - 4} more" if len(found) > 4 else ""
            self.say(
                f"{label.role}/{label.phase} has run for {seconds:.0f} s ({usual}) on {places}"
                f"{more}. Where it is: py-spy dump --pid PID, there. If it is stuck, kill it: an "
                "engine that never stops is replaced, else the run goes on from its newest "
                "checkpoint with run.restarts, or --resume"
            )
            for _, one in found:
                one.told_after = TIMES * (now - one.since)
