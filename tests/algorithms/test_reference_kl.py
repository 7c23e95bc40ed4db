"""The KL to the reference: what rewards pay of it, its term of the loss, and its adaptive coefficient."""

from __future__ import annotations

import math

import attrs
import pytest
import torch
from helpers.steps import MASK, OLD, REF

from hybridflow.algorithms.grpo import GRPO, GRPOConfig
from hybridflow.algorithms.ppo import PPO, PPOConfig
from hybridflow.algorithms.reference_kl import KLConfig, ReferenceKL, RewardKLConfig
from hybridflow.algorithms.rloo import RLOO, RLOOConfig
from hybridflow.core.values.batch import Batch
from hybridflow.core.values.metrics import Metrics
from hybridflow.kit.testing import TinyRun


def test_each_token_of_the_policy_pays_beta_times_its_kl():
    ref = REF.masked_fill(MASK == 0, math.nan)  # what is under the mask is not read
    paid, figures = ReferenceKL(RewardKLConfig(kl_coef=0.1)).penalty(MASK, OLD, ref)
    torch.testing.assert_close(paid, torch.tensor([[0.05, -0.1, 0.0], [0.1, 0.0, -0.1]]))
    assert float(figures["kl"]) == pytest.approx((0.5 - 1 + 1 - 1) / 4) and figures["beta"] == 0.1


def test_a_kl_in_the_loss_costs_no_reward_and_is_told():
    kl = ReferenceKL(KLConfig(kl_coef=0.1))
    paid, figures = kl.penalty(MASK, OLD, REF)
    assert not paid.any() and kl.in_loss == 0.1
    # k3, d = 0.5, -1, 1, -1: e^-0.5 - 1 + 0.5, e - 2, e^-1, e - 2
    assert float(figures["kl"]) == pytest.approx(
        (0.1065307 + 2 * 0.7182818 + 0.3678794) / 4, rel=1e-5
    )


def test_without_a_coefficient_there_is_no_reference_and_no_penalty():
    kl = ReferenceKL(KLConfig())
    paid, figures = kl.penalty(MASK)
    assert kl.roles() == () and not kl.reads_old_logprobs and kl.in_loss == 0.0
    assert paid.shape == MASK.shape and not paid.any() and figures == {}
    assert [role.name for role in ReferenceKL(RewardKLConfig()).roles()] == ["ref"]


@pytest.mark.parametrize(
    ("changes", "asked"),
    [
        ({}, True),
        ({"kl_in": "loss", "kl_kind": "k3"}, False),
        ({"kl_in": "loss", "kl_target": 0.1}, True),
    ],
)
def test_the_policys_own_logprobs_are_needed_where_the_kl_is_measured_before_the_update(
    changes, asked
):
    assert ReferenceKL(RewardKLConfig(**changes)).reads_old_logprobs is asked


def test_the_coefficient_follows_the_kl_of_the_batch():
    kl = ReferenceKL(RewardKLConfig(kl_coef=0.1, kl_target=0.5, kl_horizon=100.0))
    measured = Batch({"advantages": torch.zeros(2)}, metrics=Metrics.of(kl=0.55))
    kl.follow(measured, 20)  # 0.55 / 0.5 - 1 = 0.1, times 20 / 100
    assert kl.beta == pytest.approx(0.1 * 1.02)
    fixed = ReferenceKL(RewardKLConfig(kl_coef=0.1))
    fixed.follow(measured, 20)
    assert fixed.beta == 0.1 and fixed.state_dict() == {}


@pytest.mark.parametrize("kl_in", ["reward", "loss"])
def test_an_adaptive_coefficient_follows_the_kl_and_is_saved(kl_in):
    config = RLOOConfig(kl_coef=0.1, kl_target=0.5, kl_horizon=100.0, kl_in=kl_in, kl_kind="k3")
    algorithm = RLOO(config)
    algorithm.kl.adaptive.update(5.0, 50)  # far above the target: 0.1 (1 + 0.2 50 / 100)
    assert algorithm.kl.beta == pytest.approx(0.11)
    fresh = RLOO(config)
    fresh.load_state_dict(algorithm.state_dict())
    assert fresh.kl.beta == algorithm.kl.beta
    assert fresh.losses()["actor"].kl_coef == (fresh.kl.beta if kl_in == "loss" else 0.0)
    assert RLOO(attrs.evolve(config, kl_target=None)).state_dict() == {}


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


def test_a_run_with_the_kl_begins_at_zero_kl_and_has_a_reference():
    with TinyRun(GRPO(GRPOConfig(prompts_per_step=4, group_size=4, kl_coef=0.1))) as run:
        metrics = [run.step(), run.step()]
        assert set(run.job.models) == {"actor", "ref"}
    assert (
        metrics[0]["actor/kl_loss"] == pytest.approx(0.0, abs=1e-6)
        and metrics[1]["actor/kl_loss"] > 0
    )


@pytest.mark.parametrize(
    ("config", "rows", "said"),
    [
        (KLConfig(kl_coef=0.1, kl_kind="k1"), 16, "k1"),
        (RewardKLConfig(kl_in="loss"), 16, "k1"),
        (KLConfig(kl_target=0.1), 16, "kl_target needs kl_coef"),
        (RewardKLConfig(kl_target=0.1, kl_horizon=50.0), 256, "kl_horizon 50 is too small"),
    ],
)
def test_settings_that_contradict_each_other_are_named(config, rows, said):
    [problem] = ReferenceKL(config).problems(rows)
    assert said in problem
    assert ReferenceKL(RewardKLConfig(kl_target=0.1)).problems(rows) == []
