"""What took how long: seconds of each call on each rank, from the workers' own clocks."""

from __future__ import annotations

from collections import defaultdict

from hybridflow.core.groups.host import Reply


class Timeline:
    """Since the last `take`."""

    def __init__(self) -> None:
        self._busy: dict[tuple[str, int], float] = defaultdict(float)

    def add(self, role: str, method: str, rank: int, reply: Reply) -> None:
        self._busy[f"{role}/{method}", rank] += reply.ended - reply.started

    def take(self) -> dict[str, float]:
        """role/method -> seconds, the busiest rank's."""
        phases: dict[str, float] = {}
        for (phase, _), seconds in self._busy.items():
            phases[phase] = max(phases.get(phase, 0.0), seconds)
        self._busy.clear()
        return phases
