"""Who worked when: one span per call and rank, from the workers' own clocks."""

from __future__ import annotations

import attrs

from hybridflow.core.groups.host import Reply


@attrs.frozen
class Span:
    """A call of a role's method on a rank; seconds since the epoch."""

    role: str
    method: str
    rank: int
    started: float
    ended: float


class Timeline:
    """Spans since the last `take`."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def add(self, role: str, method: str, rank: int, reply: Reply) -> None:
        self.spans.append(Span(role, method, rank, reply.started, reply.ended))

    def take(self) -> list[Span]:
        spans, self.spans = self.spans, []
        return spans


def seconds_per_phase(spans: list[Span]) -> dict[str, float]:
    """role/method -> seconds, the busiest rank's."""
    busy: dict[tuple[str, int], float] = {}
    for span in spans:
        key = (f"{span.role}/{span.method}", span.rank)
        busy[key] = busy.get(key, 0.0) + span.ended - span.started
    phases: dict[str, float] = {}
    for (phase, _), seconds in busy.items():
        phases[phase] = max(phases.get(phase, 0.0), seconds)
    return phases
