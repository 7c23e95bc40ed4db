"""GRPO: numbers computed by hand, and steps of a real run."""

from __future__ import annotations

import statistics

import attrs
import pytest
import torch
from helpers.batches import plain
from helpers.steps import Watched, close, members, minus_mean, scored

from hybridflow.algorithms.grpo import GRPO, GRPOConfig
from hybridflow.core.contracts.loss import Counts
from hybridflow.core.workers.reduction import reduce_terms
from hybridflow.kit.testing import TinyRun

SMALL = GRPOConfig(prompts_per_step=4, group_size=4)


class Kept(Watched, GRPO):
    pass


def advantages(scale: str, scores, group):
    algorithm = GRPO(attrs.evolve(SMALL, scale=scale))
    mask = torch.ones(len(scores), 2)
    return algorithm.advantages(torch.tensor(scores), torch.tensor(group), mask)["advantages"][
        :, 0
    ].tolist()


def test_advantages_are_the_scores_normalised_within_their_group():
    # group 0: 1 and 0, mean 0.5, unbiased std 0.7071; group 1: 3, 0, 0, mean 1, std 1.7321; group 2: equal scores
    found = advantages("std", [1.0, 3.0, 0.0, 0.0, 0.0, 2.0, 2.0], [0, 1, 0, 1, 1, 2, 2])
    expected = [0.70711, 1.15470, -0.70711, -0.57735, -0.57735, 0.0, 0.0]
    assert found == pytest.approx(expected, abs=1e-5)


def test_without_the_division_they_are_centred():
    assert advantages("none", [1.0, 0.0, 3.0, 0.0], [5, 5, 9, 9]) == pytest.approx(
        [0.5, -0.5, 1.5, -1.5]
    )


def test_grpo_with_the_kl_in_the_reward():
    found = scored(GRPO(GRPOConfig(kl_coef=0.1, kl_in="reward", kl_kind="k1")), [1.0, 0.0])
    # rewards 1.05, 0: mean 0.525, unbiased std 0.7424621; 0.525 / 0.7424631
    close(found["advantages"], [[0.707106, 0.707106, 0.0], [-0.707106, 0.0, -0.707106]])


def test_the_kl_in_the_loss_leaves_the_advantages_alone():
    with_kl, without = (scored(GRPO(GRPOConfig(kl_coef=beta)), [1.0, 0.0]) for beta in (0.1, 0.0))
    assert torch.equal(with_kl["advantages"], without["advantages"])


def test_tokens_of_a_tool_have_no_advantage():
    mask = torch.tensor([[1.0, 0.0, 1.0], [1.0, 1.0, 0.0]])
    found = GRPO(SMALL).advantages(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), mask)[
        "advantages"
    ]
    assert (found[mask == 0] == 0).all() and (found[mask == 1] != 0).all()


@pytest.mark.parametrize(
    ("how", "expected"),
    # rows of 1 and 3 tokens with loss 4 and 1, 2, 3 per token
    [("seq-mean-token-mean", (4 + 2) / 2), ("token-mean", 10 / 4)],
)
def test_the_mean_is_over_each_response_or_over_all_tokens(how, expected):
    batch = {"loss_mask": torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]])}
    batch["advantages"] = torch.tensor([[-4.0, 0.0, 0.0], [-1.0, -2.0, -3.0]])
    loss = GRPO(attrs.evolve(SMALL, how=how)).losses()["actor"]
    found = loss(batch, {"logprobs": torch.full((2, 3), -1.0), "entropy": torch.ones(2, 3)})
    total, _ = reduce_terms(found, batch["loss_mask"], Counts(4, 2, 2), Counts(4, 2, 2))
    assert float(total) == pytest.approx(expected)


def test_a_step_trains_on_scores_normalised_within_each_prompts_responses():
    with TinyRun(Kept(attrs.evolve(SMALL, how="token-mean"))) as run:
        metrics = run.step()
        batch = run.algorithm.batch
    scores, group, advantages = (plain(batch[name]) for name in ("scores", "group", "advantages"))
    for at, row in enumerate(advantages):
        own = members(scores, group, at)
        spread = statistics.stdev(own) + 1e-6
        want = (scores[at] - statistics.fmean(own)) / spread
        assert len(own) == 4 and row == pytest.approx([want] * len(row), abs=1e-4)
    loss = minus_mean(advantages, "token-mean")
    assert metrics["actor/policy_loss"] == pytest.approx(loss, abs=1e-5)
    assert abs(loss) > 1e-3, "the test needs responses of unequal lengths"
    assert metrics["reward/scores"] == pytest.approx(statistics.fmean(scores), rel=1e-6)


def test_the_reward_rises():
    config = GRPOConfig(prompts_per_step=8, group_size=8)
    with TinyRun(GRPO(config), {"actor": {"optimizer": {"lr": 5e-3}}}) as run:
        scores = [run.step()["reward/scores"] for _ in range(10)]
    assert sum(scores[-3:]) / 3 > sum(scores[:2]) / 2 + 0.15
