"""PPO: numbers computed by hand, and steps of a real run."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.batches import plain
from helpers.steps import Watched

from hybridflow.algorithms.ppo import PPO, PPOConfig, ValueLoss
from hybridflow.kit.testing import TinyRun


class Kept(Watched, PPO):
    pass


def advantages(config: PPOConfig, mask=((1.0, 1.0),), **columns):
    given = dict(
        scores=[1.0], old_logprobs=[[-1.0, -2.0]], values=[[0.5, 0.2]], ref_logprobs=[[-1.5, -1.0]]
    )
    tensors = {
        name: torch.tensor(value) for name, value in (given | columns).items() if value is not None
    }
    return PPO(config).advantages(loss_mask=torch.tensor(mask), **tensors)


def test_advantages_and_returns_are_those_computed_by_hand():
    found = advantages(PPOConfig(kl_coef=0.1, lam=0.95))
    # kl 0.5, -1; rewards -0.05, 1.1; delta -0.35, 0.9; advantages -0.35 + 0.95 * 0.9 = 0.505, 0.9
    torch.testing.assert_close(found["returns"], torch.tensor([[1.005, 1.1]]))
    torch.testing.assert_close(
        found["advantages"], torch.tensor([[-(0.5**0.5), 0.5**0.5]]), atol=1e-5, rtol=0
    )
    assert float(found["kl"]) == pytest.approx(-0.25) and found["beta"] == 0.1


def test_the_discount_is_per_token():
    found = advantages(PPOConfig(kl_coef=0.0, lam=1.0, gamma=0.5), ref_logprobs=None)
    torch.testing.assert_close(
        found["returns"], torch.tensor([[0.5, 1.0]])
    )  # the score, one token away
    assert "kl" not in found  # there is no reference


def test_another_estimator_of_the_penalty():
    found = advantages(PPOConfig(kl_coef=0.1, kl_kind="k2", lam=1.0))
    # d 0.5, -1: k2 0.125, 0.5; rewards -0.0125, 0.95
    torch.testing.assert_close(found["returns"], torch.tensor([[0.9375, 0.95]]))


def test_a_tools_tokens_are_passed_over():
    columns = dict(
        old_logprobs=[[-1.0, -9.0, -2.0]],
        values=[[0.5, 77.0, 0.2]],
        ref_logprobs=[[-1.5, math.nan, -1.0]],
    )
    found = advantages(PPOConfig(kl_coef=0.1), mask=((1.0, 0.0, 1.0),), **columns)
    torch.testing.assert_close(found["returns"], torch.tensor([[1.005, 0.0, 1.1]]))
    assert float(found["kl"]) == pytest.approx(-0.25)


@pytest.mark.parametrize(
    ("clip", "expected"), [(0.2, [0.32, 0.5 * 0.25]), (None, [0.125, 0.5 * 0.01])]
)
def test_the_value_loss_is_the_larger_of_the_clipped_and_the_plain_one(clip, expected):
    # old 0, new 0.5, return 1: plain 0.125, clipped to 0.2: 0.32; old 0, new 0.6, return 0.7: 0.005 and 0.125
    batch = dict(values=[[0.0, 0.0]], returns=[[1.0, 0.7]])
    tensors = {name: torch.tensor(value) for name, value in batch.items()}
    found = {
        term.name: term for term in ValueLoss(clip)(tensors, {"values": torch.tensor([[0.5, 0.6]])})
    }
    assert found["value_loss"].value[0].tolist() == pytest.approx(expected)
    assert found["value"].weight == 0.0 and found["value"].value[0].tolist() == pytest.approx(
        [0.5, 0.6]
    )


def test_a_steps_critic_learns_the_values_that_gae_leads_to():
    with TinyRun(Kept(PPOConfig(prompts_per_step=8, kl_coef=0.0, gamma=0.9, lam=0.8))) as run:
        metrics = run.step()
        batch = run.algorithm.batch
    errors = []
    for score, values, returns in zip(
        *(plain(batch[n]) for n in ("scores", "values", "returns")), strict=True
    ):
        following = advantage = 0.0
        rewards = [0.0] * (len(values) - 1) + [score]
        for at in reversed(range(len(values))):
            advantage = rewards[at] + 0.9 * following - values[at] + 0.9 * 0.8 * advantage
            following = values[at]
            assert returns[at] == pytest.approx(advantage + values[at], abs=1e-5)
            errors.append(advantage**2 / 2)
    # the only update's values are those before it: nothing is clipped
    assert metrics["critic/value_loss"] == pytest.approx(sum(errors) / len(errors), rel=1e-4)


def test_epochs_of_mini_batches_are_so_many_optimizer_steps():
    algorithm = PPO(PPOConfig(prompts_per_step=8, mini_batch_size=3, epochs=2))
    with TinyRun(algorithm) as run:
        run.step()
        taken = [run.worker(role).backend.version for role in ("actor", "critic", "ref")]
    assert taken == [6, 6, 0] and algorithm.updates_per_step() == 6


def test_without_a_penalty_there_is_no_reference():
    names = [role.name for role in PPO(PPOConfig(kl_coef=0.0)).roles()]
    assert names == ["actor", "reward", "critic"]
    assert [role.name for role in PPO(PPOConfig()).roles()] == ["actor", "ref", "reward", "critic"]
