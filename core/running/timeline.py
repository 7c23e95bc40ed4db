"""Seconds of each call on each rank, by the workers' own clocks."""

from __future__ import annotations

from collections import defaultdict

from hybridflow.core.groups.host import Reply


class Timeline:
    """Busy seconds of every rank since the last `take`."""

    def __init__(self) -> None:
        self._busy: dict[tuple[str, int], float] = defaultdict(float)

    def add(self, role: str, method: str, rank: int, reply: Reply) -> None:
        """Add the time that one rank spent on one call."""
        self._busy[f"{role}/{method}", rank] += reply.ended - reply.started

    def take(self) -> dict[str, float]:
        """Return role/method -> seconds of the busiest rank, and begin anew."""
        # The other ranks wait for the busiest one, so its time is the call's.
        phases: dict[str, float] = {}
        for (phase, _), seconds in self._busy.items():
            phases[phase] = max(phases.get(phase, 0.0), seconds)
        self._busy.clear()
        return phases
