"""When a run has reached what it was to reach."""

from __future__ import annotations

import pytest
from helpers.jobs import job_of

from hybridflow.core.running.run import goal_reached


@pytest.mark.parametrize(
    ("stop_at", "scores", "reached"),
    [
        (0.5, [0.2, 0.5], True),
        (0.5, [0.7, 0.2], True),  # once is enough
        (0.5, [0.2, 0.49], False),
        (-1.0, [-1.5], False),
        (0.0, [0.0], True),
        (0.5, [], False),
        (None, [1.0], False),
    ],
)
def test_a_goal_is_reached_at_the_first_score_not_below_it(tmp_path, stop_at, scores, reached):
    goal = {} if stop_at is None else {"stop_at": stop_at, "every": 1}
    job = job_of(tmp_path, validation={"data": {"limit": 2}, **goal})
    found = [{"validation/score": score, "validation/nll": 9.0} for score in scores]
    assert goal_reached(job, dict(enumerate(found))) is reached


def test_a_loss_alone_reaches_nothing_nor_does_a_run_without_validation(run_of, tmp_path):
    run = run_of(stop_at=0.5)
    run.validations[0] = {"validation/nll": 9.0}
    assert not run.reached
    run.validations[2] = {"validation/score": 0.75}
    assert run.reached
    assert not goal_reached(job_of(tmp_path, validation={}), {0: {"validation/score": 1.0}})
