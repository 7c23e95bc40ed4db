"""What `hybridflow plan` would say of a run, beside what it takes."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping

from hybridflow.core.errors import HybridFlowError
from hybridflow.core.job import Job
from hybridflow.core.mapping.cluster import read_cluster
from hybridflow.core.mapping.job import as_written, plannable
from hybridflow.core.mapping.search import Mapping as Placed

STAGES = {"generate": "generation", "infer": "inference", "train": "training"}
METHODS = {
    "generate": "generate", "episodes": "generate", "logprobs": "infer", "values": "infer", "score": "infer", "loss": "infer",
    "update": "train",
}  # fmt: skip
"""Worker methods -> the stage that they are work of."""
SKIPPED = 1
"""First steps that are not counted: they also warm up."""


class Foresight:
    """Predicted seconds of a step and of each role's work, and what they were."""

    def __init__(self, seconds: float, work: Mapping[tuple[str, str], float]):
        self.seconds, self.work = seconds, dict(work)
        """(role, "generate", "infer" or "train") -> seconds of a step."""
        self._steps: list[Mapping[str, float]] = []

    @classmethod
    def of(cls, job: Job) -> Foresight | None:
        """None for a job that does not say what it runs on (placement.cluster), or that cannot be planned."""
        if job.placement.cluster is None:
            return None
        try:
            found = as_written(job, plannable(job), read_cluster(job.placement.cluster))
        except HybridFlowError:  # said at the start
            return None
        return cls(found.seconds, _work(found)) if isinstance(found, Placed) else None

    def add(self, values: Mapping[str, float]) -> None:
        """A step's metrics."""
        self._steps.append({k: v for k, v in values.items() if k.startswith("seconds/")})

    def lines(self) -> list[str]:
        """Predicted and measured, for a reader; nothing before a step counts."""
        steps = self._steps[SKIPPED:]
        if not steps:
            return []
        step = statistics.median(s["seconds/step"] for s in steps)
        said = [
            f"a step took {_seconds(step)} (median), {_seconds(self.seconds)} were predicted ({_off(self.seconds, step)})"
        ]
        for (role, verb), predicted in self.work.items():
            measured = statistics.median(_spent(s, role, verb) for s in steps)
            if measured:
                off = _off(predicted, measured)
                said.append(f"  {role} {STAGES[verb]}: {_seconds(measured)}, predicted {_seconds(predicted)} ({off})")
        return said


def _work(mapping: Placed) -> dict[tuple[str, str], float]:
    choices = [c for pool in mapping.pools for c in pool.entry.choices]
    every: Iterable[tuple[tuple[str, str], float]] = (
        ((c.option.model.name, verb), time)
        for c in choices
        for verb, time in (("generate", c.seconds), ("infer", c.option.infer), ("train", c.option.train))
    )
    return {key: time for key, time in every if time}


def _spent(values: Mapping[str, float], role: str, verb: str) -> float:
    return sum(values.get(f"seconds/{role}/{method}", 0.0) for method, of in METHODS.items() if of == verb)


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 0.1 else f"{1000 * value:.1f} ms"


def _off(predicted: float, measured: float) -> str:
    return f"{100 * (predicted / measured - 1):+.0f}%"
