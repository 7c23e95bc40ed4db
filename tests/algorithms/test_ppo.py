"""PPO: numbers computed by hand, and steps of a real run."""

from __future__ import annotations

import math

import pytest
import torch

from hybridflow.algorithms.policy import PolicyConfig, PolicyLoss
from hybridflow.algorithms.ppo import PPO, PPOConfig, ValueLoss
from hybridflow.core.contracts.loss import Counts
from hybridflow.core.workers.reduction import reduce_terms
from hybridflow.kit.testing import TinyRun


def terms(loss, batch: dict, outputs: dict) -> dict:
    """The loss's terms on [B, T] lists, by name."""
    tensors = {name: torch.tensor(value) for name, value in batch.items()}
    found = loss({"loss_mask": torch.ones(1, 2), **tensors}, {n: torch.tensor(v) for n, v in outputs.items()})
    return {term.name: term for term in found}


def advantages(config: PPOConfig, mask=((1.0, 1.0),), **columns):
    given = dict(scores=[1.0], old_logprobs=[[-1.0, -2.0]], values=[[0.5, 0.2]], ref_logprobs=[[-1.5, -1.0]])
    tensors = {name: torch.tensor(value) for name, value in (given | columns).items() if value is not None}
    return PPO(config).advantages(loss_mask=torch.tensor(mask), **tensors)


def test_advantages_and_returns_are_those_computed_by_hand():
    found = advantages(PPOConfig(kl_coef=0.1, lam=0.95))
    # kl 0.5, -1; rewards -0.05, 1.1; delta -0.35, 0.9; advantages -0.35 + 0.95 * 0.9 = 0.505, 0.9
    torch.testing.assert_close(found["returns"], torch.tensor([[1.005, 1.1]]))
    torch.testing.assert_close(found["advantages"], torch.tensor([[-(0.5**0.5), 0.5**0.5]]), atol=1e-5, rtol=0)
    assert float(found["kl"]) == pytest.approx(-0.25) and found["beta"] == 0.1


def test_the_discount_is_per_token():
    found = advantages(PPOConfig(kl_coef=0.0, lam=1.0, gamma=0.5), ref_logprobs=None)
    torch.testing.assert_close(found["returns"], torch.tensor([[0.5, 1.0]]))  # the score, one token away
    assert "kl" not in found  # there is no reference


def test_another_estimator_of_the_penalty():
    found = advantages(PPOConfig(kl_coef=0.1, kl_kind="k2", lam=1.0))
    # d 0.5, -1: k2 0.125, 0.5; rewards -0.0125, 0.95
    torch.testing.assert_close(found["returns"], torch.tensor([[0.9375, 0.95]]))


def test_a_tools_tokens_are_passed_over():
    columns = dict(old_logprobs=[[-1.0, -9.0, -2.0]], values=[[0.5, 77.0, 0.2]], ref_logprobs=[[-1.5, math.nan, -1.0]])
    found = advantages(PPOConfig(kl_coef=0.1), mask=((1.0, 0.0, 1.0),), **columns)
    torch.testing.assert_close(found["returns"], torch.tensor([[1.005, 0.0, 1.1]]))
    assert float(found["kl"]) == pytest.approx(-0.25)


@pytest.mark.parametrize(
    ("ratio", "advantage", "dual_clip", "loss"),
    [
        (1.5, 1.0, None, -1.2),  # clipped at 1 + clip_high
        (0.5, 1.0, None, -0.5),  # worse than the bound: not clipped
        (0.5, -1.0, None, 0.7),  # clipped at 1 - clip_low
        (1.5, -1.0, None, 1.5),
        (5.0, -1.0, 3.0, 3.0),  # dual clip: at most 3 |A|
        (5.0, 1.0, 3.0, -1.2),
    ],
)
def test_the_policy_loss_is_clipped_as_by_hand(ratio, advantage, dual_clip, loss):
    config = PolicyConfig(clip_low=0.3, clip_high=0.2, dual_clip=dual_clip)
    batch = dict(old_logprobs=[[-1.0, -1.0]], advantages=[[advantage, 0.0]])
    found = terms(PolicyLoss(config), batch, dict(logprobs=[[-1.0 + math.log(ratio), -1.0]]))
    assert found["policy_loss"].value[0].tolist() == pytest.approx([loss, 0.0], abs=1e-6)
    assert found["clip_fraction"].value[0].tolist() == [float(not 0.7 <= ratio <= 1.2), 0.0]
    d = math.log(ratio)  # k3 of KL(old || new)
    assert found["approx_kl"].value[0].tolist() == pytest.approx([math.exp(d) - 1 - d, 0.0], abs=1e-5)


def test_the_entropy_bonus_lowers_the_loss():
    batch = dict(old_logprobs=[[-1.0, -1.0]], advantages=[[1.0, 1.0]])
    outputs = dict(logprobs=[[-1.0, -1.0]], entropy=[[2.0, 4.0]])
    loss = PolicyLoss(PolicyConfig(entropy_coef=0.1))
    assert loss.needs == ["logprobs", "entropy"]
    total, _ = reduce_terms(terms(loss, batch, outputs).values(), torch.ones(1, 2), Counts(2, 1, 1), Counts(2, 1, 1))
    assert float(total) == pytest.approx(-1.0 - 0.1 * 3.0)


def test_the_correction_for_the_engine_multiplies_the_loss():
    batch = dict(old_logprobs=[[-1.0, -1.0]], advantages=[[1.0, 1.0]], rollout_logprobs=[[-1.5, -3.0]])
    for mode, weights in (("truncate", [math.exp(0.5), 2.0]), ("mask", [math.exp(0.5), 0.0])):
        loss = PolicyLoss(PolicyConfig(correction=mode, correction_high=2.0))
        assert "rollout_logprobs" in loss.reads
        value = terms(loss, batch, dict(logprobs=[[-1.0, -1.0]]))["policy_loss"].value
        assert value[0].tolist() == pytest.approx([-w for w in weights], rel=1e-5)


@pytest.mark.parametrize(("clip", "expected"), [(0.2, [0.32, 0.5 * 0.25]), (None, [0.125, 0.5 * 0.01])])
def test_the_value_loss_is_the_larger_of_the_clipped_and_the_plain_one(clip, expected):
    # old 0, new 0.5, return 1: plain 0.125, clipped to 0.2: 0.32; old 0, new 0.6, return 0.7: 0.005 and 0.125
    batch = dict(values=[[0.0, 0.0]], returns=[[1.0, 0.7]])
    found = terms(ValueLoss(clip), batch, dict(values=[[0.5, 0.6]]))
    assert found["value_loss"].value[0].tolist() == pytest.approx(expected)
    assert found["value"].weight == 0.0 and found["value"].value[0].tolist() == pytest.approx([0.5, 0.6])


def test_the_adaptive_coefficient_follows_the_measured_kl():
    config = PPOConfig(prompts_per_step=8, kl_coef=0.05, kl_target=0.1, kl_horizon=100.0)
    with TinyRun(PPO(config)) as run:
        first, second = run.step(), run.step()
    assert first["kl"] == pytest.approx(0.0, abs=1e-5)  # the reference is the policy
    assert first["beta"] == 0.05
    assert second["beta"] == pytest.approx(0.05 * (1 - 0.2 * 8 / 100))
    restored = PPO(config)
    restored.load_state_dict({"adaptive": {"value": 0.07}})
    assert restored.kl.beta == 0.07 and PPO(PPOConfig()).kl.beta == 0.05


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


def test_settings_that_contradict_each_other_are_named():
    assert "larger than the 4 sequences" in PPO(PPOConfig(prompts_per_step=4, mini_batch_size=8)).problems()[0]
    assert "kl_coef > 0" in PPO(PPOConfig(kl_coef=0.0, kl_target=0.1)).problems()[0]
