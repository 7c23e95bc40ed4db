"""A planner's predicted times beside the measured ones."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from hybridflow.core.contracts.planner import STAGE_NAMES, Prediction
from hybridflow.core.errors import HybridFlowError
from hybridflow.core.job.job import Job
from hybridflow.core.job.placement import planner_of
from hybridflow.core.values.units import seconds

METHODS = {
    "generate": "generate",
    "episodes": "generate",
    "logprobs": "infer",
    "values": "infer",
    "score": "infer",
    "loss": "infer",
    "update": "train",
}
"""Worker method -> the step stage that it is work of."""
SKIPPED = 1
"""Number of first steps that are left out, because they include warm-up."""


def predicted(job: Job) -> Comparison | None:
    """Predict the job's times.

    The result is None for a job that names no hardware (placement.cluster) or cannot be planned.
    """
    if job.placement.cluster is None:
        return None
    try:
        return Comparison(planner_of(job).predict(job, job.placement.cluster))
    except HybridFlowError:  # core.job.placement has reported the reason
        return None


class Comparison:
    """Predicted seconds of a step and of each role's work, compared with the measured ones."""

    def __init__(self, prediction: Prediction):
        self.prediction = prediction
        self._steps: list[Mapping[str, float]] = []

    @property
    def seconds(self) -> float:
        """Predicted seconds per step."""
        return self.prediction.seconds

    def add(self, values: Mapping[str, float]) -> None:
        """Add the metrics of a step, of which the measured times are kept."""
        times = {name: value for name, value in values.items() if name.startswith("seconds/")}
        self._steps.append(times)

    def lines(self) -> list[str]:
        """Return lines for the console: measured medians and predictions, of a step and per role.

        There are none before the first step that counts.
        """
        steps = self._steps[SKIPPED:]
        if not steps:
            return []

        # The whole step
        step = statistics.median(times["seconds/step"] for times in steps)
        lines = [
            f"a step took {seconds(step)} (median), "
            f"{seconds(self.seconds)} were predicted ({_off(self.seconds, step)})"
        ]

        # Each role's work. What was not done in these steps has no time to compare.
        for (role, verb), predicted in self.prediction.work.items():
            measured = statistics.median(_spent(times, role, verb) for times in steps)
            if measured:
                lines.append(
                    f"  {role} {STAGE_NAMES[verb]}: {seconds(measured)}, "
                    f"predicted {seconds(predicted)} ({_off(predicted, measured)})"
                )
        return lines


def _spent(times: Mapping[str, float], role: str, verb: str) -> float:
    """Return the seconds of a role's methods that are work of the step stage `verb`."""
    # By the workers' own clocks, on the busiest rank.
    return sum(
        times.get(f"seconds/{role}/{method}", 0.0)
        for method, stage in METHODS.items()
        if stage == verb
    )


def _off(predicted: float, measured: float) -> str:
    """Return the prediction's relative error in percent, with its sign."""
    return f"{100 * (predicted / measured - 1):+.0f}%"
