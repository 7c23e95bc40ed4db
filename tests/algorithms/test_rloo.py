"""RLOO: the advantages by hand, and a step of a real run."""

from __future__ import annotations

import pytest
import torch
from helpers.batches import plain
from helpers.steps import Watched, close, members, minus_mean, scored

from hybridflow.algorithms.rloo import RLOO, RLOOConfig
from hybridflow.kit.testing import TinyRun


class Kept(Watched, RLOO):
    pass


def test_rloo_subtracts_the_others_reward_in_which_the_kl_of_the_response_is_paid():
    found = scored(RLOO(RLOOConfig(kl_coef=0.1)), [1.0, 0.0])
    # rewards 1 + 0.05 and 0; each less the other
    close(found["advantages"], [[1.05, 1.05, 0.0], [-1.05, 0.0, -1.05]])
    assert float(found["kl"]) == pytest.approx(-0.5 / 4) and found["beta"] == 0.1


def test_rloo_of_three_takes_the_mean_of_two():
    algorithm = RLOO(RLOOConfig(kl_coef=0.0))
    found = algorithm.advantages(
        torch.tensor([3.0, 1.0, 2.0]), torch.tensor([7, 7, 7]), torch.ones(3, 1)
    )
    close(found["advantages"], [[1.5], [-1.5], [0.0]])
    assert set(found) == {"advantages"}


def test_a_step_trains_each_response_on_its_score_less_the_mean_of_the_others():
    with TinyRun(Kept(RLOOConfig(prompts_per_step=4, group_size=3, kl_coef=0.0))) as run:
        metrics = run.step()
        batch = run.algorithm.batch
        assert run.worker("actor").backend.version == 1
    scores, group, advantages = (plain(batch[name]) for name in ("scores", "group", "advantages"))
    for at, row in enumerate(advantages):
        own = members(scores, group, at)
        others = (sum(own) - scores[at]) / 2
        assert len(own) == 3 and row == pytest.approx([scores[at] - others] * len(row), abs=1e-6)
    assert max(abs(row[0]) for row in advantages) > 0.1
    want = minus_mean(advantages, "seq-mean-token-sum")
    assert metrics["actor/policy_loss"] == pytest.approx(want, abs=1e-5)
