"""Dr. GRPO: GRPO's advantages without the spread, its loss divided by a constant; by hand, and in a real step."""

from __future__ import annotations

import pytest
import torch
from helpers.batches import plain
from helpers.steps import MASK, Watched, close, members, minus_mean, scored

from hybridflow.algorithms.dr_grpo import DrGRPO, DrGRPOConfig
from hybridflow.kit.testing import TinyRun


class Kept(Watched, DrGRPO):
    pass


def test_advantages_are_centred_and_not_scaled():
    found = scored(DrGRPO(DrGRPOConfig()), [3.0, 0.0])
    close(found["advantages"], [[1.5, 1.5, 0.0], [-1.5, 0.0, -1.5]])


def test_the_loss_is_divided_by_the_constant_length():
    loss = DrGRPO(DrGRPOConfig(length=8)).losses()["actor"]
    terms = loss(
        {"loss_mask": MASK, "advantages": torch.ones(2, 3)},
        {"logprobs": torch.full((2, 3), -1.0), "entropy": torch.ones(2, 3)},
    )
    [term] = [term for term in terms if term.name == "policy_loss"]
    assert (term.how, term.length) == ("seq-mean-token-sum-norm", 8)


def test_a_step_trains_on_centred_scores_over_that_length():
    with TinyRun(Kept(DrGRPOConfig(prompts_per_step=4, group_size=4, length=5))) as run:
        metrics = run.step()
        batch = run.algorithm.batch
    scores, group, advantages = (plain(batch[name]) for name in ("scores", "group", "advantages"))
    for at, row in enumerate(advantages):
        mean = sum(members(scores, group, at)) / 4
        assert row == pytest.approx([scores[at] - mean] * len(row), abs=1e-6)
    want = minus_mean(advantages, "seq-mean-token-sum-norm", length=5)
    assert metrics["actor/policy_loss"] == pytest.approx(want, abs=1e-6)
    assert abs(want) > 1e-3, "the test needs responses of unequal lengths"
