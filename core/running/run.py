"""The state of a run that the loop, its parts and observers share."""

from __future__ import annotations

import attrs

from hybridflow.core.context import GroupStepContext
from hybridflow.core.job.job import Job
from hybridflow.core.running.checkpoint import Checkpoints
from hybridflow.core.running.samples import RowRecorder
from hybridflow.core.running.session import Session


@attrs.define
class Run:
    """The state of a run, for its parts and its observers."""

    # Made once
    job: Job
    session: Session
    """The processes, worker groups and data of the run."""
    ctx: GroupStepContext
    """The context that the algorithm's steps get."""
    checkpoints: Checkpoints
    recorder: RowRecorder = attrs.field(init=False)
    """Chooses the rows that are recorded of each step."""

    # Changes with every step
    step: int = 0
    """Number of completed steps."""
    tokens: int = 0
    """Number of tokens that the actor has generated in them."""
    validations: dict[int, dict[str, float]] = attrs.field(factory=dict)
    """Step -> metrics of the validation after it."""

    def __attrs_post_init__(self) -> None:
        self.recorder = RowRecorder(self.session, self.ctx, self.job.run.samples)
        self.ctx.recorder = self.recorder

    @property
    def reached(self) -> bool:
        """Whether a validation has reached the score that ends the run."""
        return goal_reached(self.job, self.validations)


def goal_reached(job: Job, validations: dict[int, dict[str, float]]) -> bool:
    """Return whether the score of any validation is at least validation.stop_at."""
    goal = None if job.validation is None else job.validation.stop_at
    scores = [metrics.get("validation/score") for metrics in validations.values()]
    return goal is not None and any(score is not None and score >= goal for score in scores)
