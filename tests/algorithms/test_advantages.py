"""The advantages of the critic-free algorithms, each computed by hand."""

from __future__ import annotations

import attrs
import pytest
import torch

from hybridflow.algorithms.dapo import DAPO, DAPOConfig
from hybridflow.algorithms.dr_grpo import DrGRPO, DrGRPOConfig
from hybridflow.algorithms.grpo import GRPO, GRPOConfig
from hybridflow.algorithms.reinforce_pp import (
    ReinforcePP,
    ReinforcePPBaseline,
    ReinforcePPBaselineConfig,
    ReinforcePPConfig,
)
from hybridflow.algorithms.remax import ReMax, ReMaxConfig
from hybridflow.algorithms.rloo import RLOO, RLOOConfig

MASK = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 1.0]])  # a response of two tokens, one with a tool's token inside
OLD = torch.tensor([[-1.0, -2.0, 0.0], [-1.0, -9.0, -3.0]])
REF = torch.tensor([[-1.5, -1.0, 0.0], [-2.0, -1.0, -2.0]])
# k1 per token: 0.5, -1 and 1, (hole), -1: sums -0.5 and 0


def close(found, want):
    torch.testing.assert_close(found, torch.tensor(want), atol=1e-5, rtol=1e-5)


def scored(algorithm, scores, group=(0, 0), **columns):
    if group is not None:
        columns["group"] = torch.tensor(group)
    return algorithm.advantages(
        scores=torch.tensor(scores), loss_mask=MASK, old_logprobs=OLD, ref_logprobs=REF, **columns
    )


def test_rloo_subtracts_the_others_reward_in_which_the_kl_of_the_response_is_paid():
    found = scored(RLOO(RLOOConfig(kl_coef=0.1)), [1.0, 0.0])
    # rewards 1 + 0.05 and 0; each less the other
    close(found["advantages"], [[1.05, 1.05, 0.0], [-1.05, 0.0, -1.05]])
    assert float(found["kl"]) == pytest.approx(-0.5 / 4) and found["beta"] == 0.1


def test_rloo_of_three_takes_the_mean_of_two():
    algorithm = RLOO(RLOOConfig(kl_coef=0.0))
    found = algorithm.advantages(torch.tensor([3.0, 1.0, 2.0]), torch.tensor([7, 7, 7]), torch.ones(3, 1))
    close(found["advantages"], [[1.5], [-1.5], [0.0]])
    assert set(found) == {"advantages"}


def test_grpo_with_the_kl_in_the_reward():
    found = scored(GRPO(GRPOConfig(kl_coef=0.1, kl_in="reward", kl_kind="k1")), [1.0, 0.0])
    # rewards 1.05, 0: mean 0.525, unbiased std 0.7424621; 0.525 / 0.7424631
    close(found["advantages"], [[0.707106, 0.707106, 0.0], [-0.707106, 0.0, -0.707106]])


def test_the_kl_in_the_loss_leaves_the_advantages_alone_and_is_told():
    with_kl = scored(GRPO(GRPOConfig(kl_coef=0.1)), [1.0, 0.0])
    without = scored(GRPO(GRPOConfig()), [1.0, 0.0])
    assert torch.equal(with_kl["advantages"], without["advantages"])
    # k3, d = 0.5, -1, 1, -1: e^-0.5 - 1 + 0.5, e - 2, e^-1, e - 2
    assert float(with_kl["kl"]) == pytest.approx((0.1065307 + 2 * 0.7182818 + 0.3678794) / 4, rel=1e-5)


def test_dr_grpo_centres_and_does_not_scale():
    found = scored(DrGRPO(DrGRPOConfig()), [3.0, 0.0])
    close(found["advantages"], [[1.5, 1.5, 0.0], [-1.5, 0.0, -1.5]])
    [term] = [t for t in loss_terms(DrGRPO(DrGRPOConfig(length=8))) if t.name == "policy_loss"]
    assert (term.how, term.length) == ("seq-mean-token-sum-norm", 8)


def loss_terms(algorithm):
    batch = {"loss_mask": MASK, "advantages": torch.ones(2, 3)}
    return algorithm.losses()["actor"](batch, {"logprobs": torch.full((2, 3), -1.0)})


def test_remax_subtracts_the_greedy_score_from_the_rewards_to_go():
    found = scored(ReMax(ReMaxConfig(kl_coef=0.1)), [1.0, 0.0], None, baseline_scores=torch.tensor([0.25, 0.5]))
    # row 0: rewards -0.05, 0.1 + 1; to go 1.05, 1.1; less 0.25.  row 1: -0.1, 0.1; to go 0, 0.1; less 0.5
    close(found["advantages"], [[0.8, 0.85, 0.0], [-0.5, 0.0, -0.4]])
    assert float(found["baseline"]) == 0.375


def test_reinforce_pp_whitens_the_rewards_to_go_over_the_batch():
    found = scored(ReinforcePP(ReinforcePPConfig(kl_coef=0.1)), [1.0, 0.0], None)
    # to go 1.05, 1.1, 0, 0.1: mean 0.5625; squared deviations 0.2376562 0.2889062 0.3164062 0.2139062, variance 0.3522917
    spread = (1.056875 / 3) ** 0.5
    want = [[0.4875 / spread, 0.5375 / spread, 0.0], [-0.5625 / spread, 0.0, -0.4625 / spread]]
    close(found["advantages"], want)


def test_reinforce_pp_discounts_over_the_tokens_of_the_policy_alone():
    algorithm = ReinforcePP(ReinforcePPConfig(kl_coef=0.0, gamma=0.5))
    found = algorithm.advantages(torch.tensor([1.0, 2.0]), MASK)
    # to go 0.5, 1 and 1, (hole), 2: mean 1.125, deviations -0.625 -0.125 -0.125 0.875, variance 1.1875 / 3
    spread = (1.1875 / 3) ** 0.5
    close(found["advantages"], [[-0.625 / spread, -0.125 / spread, 0.0], [-0.125 / spread, 0.0, 0.875 / spread]])


def test_the_baseline_form_subtracts_the_groups_mean_and_whitens():
    algorithm = ReinforcePPBaseline(ReinforcePPBaselineConfig(kl_coef=0.0))
    found = algorithm.advantages(torch.tensor([1.0, 0.0]), torch.tensor([4, 4]), MASK)
    # 0.5 twice and -0.5 twice: mean 0, variance 1 / 3
    close(found["advantages"], [[0.5 * 3**0.5, 0.5 * 3**0.5, 0.0], [-0.5 * 3**0.5, 0.0, -0.5 * 3**0.5]])
    assert algorithm.losses()["actor"].reads == ["advantages"]
    assert "ref_logprobs" in ReinforcePPBaseline(ReinforcePPBaselineConfig()).losses()["actor"].reads


def test_dapo_punishes_what_is_too_long():
    algorithm = DAPO(DAPOConfig(scale="none", overlong_cache=2))
    algorithm.limit = 3
    mask = torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
    found = algorithm.advantages(torch.tensor([1.0, 1.0]), torch.tensor([0, 0]), mask)
    # lengths 1 and 3 of a limit of 3 with a cache of 2: 0 and (1 - 3) / 2; scores 1 and 0, centred
    close(found["advantages"], [[0.5, 0.0, 0.0], [-0.5, -0.5, -0.5]])


CONTRADICTIONS = [
    (GRPO, GRPOConfig(kl_coef=0.1, kl_kind="k1"), "k1"),
    (RLOO, RLOOConfig(kl_in="loss"), "k1"),
    (GRPO, GRPOConfig(kl_target=0.1), "kl_target needs kl_coef"),
    (GRPO, GRPOConfig(how="seq-mean-token-sum-norm"), "needs length"),
    (GRPO, GRPOConfig(dual_clip=1.0), "dual_clip must be above 1"),
    (RLOO, RLOOConfig(kl_target=0.1, kl_horizon=50.0), "kl_horizon 50 is too small for the 256 sequences"),
    (ReMax, ReMaxConfig(mini_batch_size=65), "larger than the 64 sequences"),
]


@pytest.mark.parametrize(("cls", "config", "said"), CONTRADICTIONS, ids=lambda v: getattr(v, "__name__", None))
def test_settings_that_contradict_each_other_are_named(cls, config, said):
    [problem] = cls(config).problems()
    assert said in problem


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
