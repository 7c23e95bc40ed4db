"""OPO: its baseline by hand and in a real step, and that it takes one update a step."""

from __future__ import annotations

import pytest
from helpers.batches import plain
from helpers.steps import Watched, close, members, scored

from hybridflow.algorithms.opo import OPO, OPOConfig
from hybridflow.core.contracts.rollout import SamplingParams
from hybridflow.kit.testing import TinyRun


class Kept(Watched, OPO):
    pass


def test_the_baseline_is_weighed_by_length():
    # Both have two tokens, so that it is the mean.
    found = scored(OPO(OPOConfig()), [3.0, 0.0])
    close(found["advantages"], [[1.5, 1.5, 0.0], [-1.5, 0.0, -1.5]])


def test_a_step_trains_on_scores_less_the_mean_of_their_group_weighed_by_length():
    with TinyRun(Kept(OPOConfig(prompts_per_step=4, group_size=4))) as run:
        run.step()
        batch = run.algorithm.batch
    scores, group, advantages = (plain(batch[name]) for name in ("scores", "group", "advantages"))
    lengths = [len(row) for row in advantages]
    assert len(set(lengths)) > 1
    for at, row in enumerate(advantages):
        weighed = sum(
            score * length
            for score, length, other in zip(scores, lengths, group, strict=True)
            if other == group[at]
        )
        baseline = weighed / sum(members(lengths, group, at))
        assert row == pytest.approx([scores[at] - baseline] * len(row), abs=1e-6)


@pytest.mark.parametrize("settings", [{"epochs": 2}, {"mini_batch_size": 8}])
def test_several_updates_a_step_are_refused(settings):
    algorithm = OPO(OPOConfig(prompts_per_step=4, group_size=4, **settings))
    [problem] = algorithm.problems(SamplingParams(max_tokens=4))
    assert problem.startswith("opo is exactly on-policy, and these settings take 2 updates a step")
