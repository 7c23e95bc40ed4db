"""What a planner says of a run, beside what it takes."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from hybridflow.core.contracts.planner import STAGE_NAMES, Prediction
from hybridflow.core.errors import HybridFlowError
from hybridflow.core.job.job import Job
from hybridflow.core.job.placement import planner_of
from hybridflow.core.values.units import seconds

METHODS = {
    "generate": "generate", "episodes": "generate", "logprobs": "infer", "values": "infer", "score": "infer", "loss": "infer",
    "update": "train",
}  # fmt: skip
"""Worker methods -> the stage that they are work of."""
SKIPPED = 1
"""First steps that are not counted: they also warm up."""


def predicted(job: Job) -> Comparison | None:
    """None for a job that does not say what it runs on (placement.cluster), or that cannot be planned."""
    if job.placement.cluster is None:
        return None
    try:
        return Comparison(planner_of(job).predict(job, job.placement.cluster))
    except HybridFlowError:  # core.job.placement has said so, and why
        return None


class Comparison:
    """Predicted seconds of a step and of each role's work, and what they were."""

    def __init__(self, prediction: Prediction):
        self.prediction = prediction
        self._steps: list[Mapping[str, float]] = []

    @property
    def seconds(self) -> float:
        """Predicted, of a step."""
        return self.prediction.seconds

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
            f"a step took {seconds(step)} (median), {seconds(self.seconds)} were predicted ({_off(self.seconds, step)})"
        ]
        for (role, verb), predicted in self.prediction.work.items():
            measured = statistics.median(_spent(s, role, verb) for s in steps)
            if measured:
                off = _off(predicted, measured)
                said.append(
                    f"  {role} {STAGE_NAMES[verb]}: {seconds(measured)}, predicted {seconds(predicted)} ({off})"
                )
        return said


def _spent(values: Mapping[str, float], role: str, verb: str) -> float:
    return sum(
        values.get(f"seconds/{role}/{method}", 0.0) for method, of in METHODS.items() if of == verb
    )


def _off(predicted: float, measured: float) -> str:
    return f"{100 * (predicted / measured - 1):+.0f}%"
