"""A run, as the controller knows it and as observers see it."""

from __future__ import annotations

import attrs

from hybridflow.core.context import StepContext
from hybridflow.core.job.job import Job
from hybridflow.core.running.checkpoint import Checkpoints
from hybridflow.core.running.session import Session


@attrs.define
class Run:
    """What every part of a run may ask for."""

    job: Job
    session: Session
    ctx: StepContext
    checkpoints: Checkpoints
    step: int = 0
    """Steps that are over."""
    validations: dict[int, dict[str, float]] = attrs.field(factory=dict)
    """Step -> the metrics of the validation after it."""

    @property
    def reached(self) -> bool:
        """Whether a validation has found the score at which the run is to end."""
        return goal_reached(self.job, self.validations)


def goal_reached(job: Job, validations: dict[int, dict[str, float]]) -> bool:
    """Whether a validation has found validation.stop_at."""
    goal = None if job.validation is None else job.validation.stop_at
    scores = [found.get("validation/score") for found in validations.values()]
    return goal is not None and any(score is not None and score >= goal for score in scores)
