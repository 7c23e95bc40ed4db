"""A planner's predicted times beside the measured ones."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from hybridflow.core.contracts.observer import Observer
from hybridflow.core.contracts.planner import STAGE_NAMES, Prediction
from hybridflow.core.errors import HybridFlowError
from hybridflow.core.job.job import Job
from hybridflow.core.values.units import seconds
from hybridflow.settle.placement import planner_of

METHODS = {
    "generate": "generate",
    "episodes": "generate",
    "logprobs": "infer",
    "values": "infer",
    "score": "infer",
    "loss": "infer",
    "update": "train",
}
"""Worker method -> the step stage to which it belongs."""
SKIPPED = 1
"""Number of first steps that are left out, because they include start-up work."""


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


class Comparison(Observer):
    """Compares predicted with measured seconds, per step and per role."""

    def __init__(self, prediction: Prediction):
        self.prediction = prediction
        self._steps: list[Mapping[str, float]] = []

    def step(self, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Keep the measured times of a step's metrics, and return the predicted ones.

        Of a role's step stage the predicted time is that of its one call, predicted/ROLE/METHOD;
        of several calls it is left out.
        """
        times = {name: value for name, value in metrics.items() if name.startswith("seconds/")}
        self._steps.append(times)
        predicted = {"seconds/predicted": self.prediction.seconds}
        for (role, stage), spent in self.prediction.work.items():
            calls = [
                f"{role}/{method}"
                for method, own in METHODS.items()
                if own == stage and f"seconds/{role}/{method}" in times
            ]
            if len(calls) == 1:
                predicted[f"predicted/{calls[0]}"] = spent
        return predicted

    def ended(self) -> list[str]:
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
            f"{seconds(self.prediction.seconds)} were predicted "
            f"({_off(self.prediction.seconds, step)})"
        ]

        # The work of each role, if it was done in these steps.
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
