"""Rewards of each token (per_token = true): one number per response token, and what algorithms make of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hybridflow.algorithms.grpo import GRPO, GRPOConfig
from hybridflow.algorithms.ppo import PPO, PPOConfig
from hybridflow.core.contracts.reward import FailureRule, FunctionReward, RewardSample
from hybridflow.core.errors import RewardError
from hybridflow.core.values.columns import tokens
from hybridflow.core.workers.failures import score_by_rule
from hybridflow.core.workers.scoring import score_samples
from hybridflow.kit.testing import TinyRun

SAMPLES = [RewardSample("p", "abc", np.array([4, 5, 6]), {}), RewardSample("p", "", np.array([], np.int64), {})]


def own_number(sample):
    return [float(token) for token in sample.response_ids]


def third(sample):
    return 3.0


def test_each_sample_gets_a_number_per_token():
    found = score_samples(FunctionReward(own_number), SAMPLES, "own", per_token=True)
    assert [f.tolist() for f in found] == [[4, 5, 6], []] and found[0].dtype == np.float32


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([1.0, 2.0], "returned 2 numbers for 3 response tokens; return one for each"),
        (1.0, "returned 1.0; with per_token = true return a list with one number for each of the 3 tokens"),
        ("abc", "returned 'abc'; with per_token = true return a list"),
        ([1.0, float("nan"), 2.0], "returned nan; return a finite float32 number"),
    ],
    ids=["short", "number", "text", "nan"],
)
def test_what_is_not_a_number_per_token_is_refused_with_the_row(given, said):
    with pytest.raises(RewardError, match=r"reward 'own' .*row 0") as caught:
        score_samples(FunctionReward(lambda sample: given), SAMPLES[:1], "own", per_token=True)
    assert said in str(caught.value)


def test_a_score_by_rule_is_at_the_last_token():
    def fails(sample):
        raise ValueError("no judge")

    found, failed = score_by_rule(FunctionReward(fails), SAMPLES, "own", FailureRule(score=-1.0), per_token=True)
    assert [f.tolist() for f in found] == [[0, 0, -1], []] and failed == 2


def tables(**reward):
    return {"reward": reward, "data": {"limit": 0}}


PARTS = [
    {"name": "own", "function": f"{__name__}:own_number", "per_token": True, "weight": 0.5},
    {"name": "third", "function": f"{__name__}:third", "weight": 2.0},
]


@pytest.fixture
def importable(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])


def test_the_parts_of_tokens_and_of_responses_add_up(importable):
    with TinyRun(GRPO(GRPOConfig(group_size=2, prompts_per_step=4)), tables(parts=PARTS)) as run:
        batch = run.ctx.actor.generate(run.ctx.prompts(4))
        scored = run.ctx.reward.score(batch)
        made, ids = list(scored["token_scores"]), list(batch["response_ids"])
        for i, (each, row) in enumerate(zip(made, ids, strict=True)):
            want = 0.5 * row.float()
            want[-1] += 6.0
            torch.testing.assert_close(each, want)
            assert float(scored["rewards/own"].values[i]) == row.sum()
        sums = torch.tensor([float(each.sum()) for each in made])
        torch.testing.assert_close(torch.as_tensor(scored["scores"].values), sums)


def test_ppo_counts_each_at_its_token_and_grpo_their_sum(importable):
    reward = {"function": f"{__name__}:own_number", "per_token": True}
    config = PPOConfig(prompts_per_step=4, kl_coef=0.0, gamma=1.0, lam=1.0)
    with TinyRun(PPO(config), tables(**reward)) as run:
        batch = run.ctx.actor.generate(run.ctx.prompts(4))
        batch = batch.join(run.ctx.reward.score(batch), run.ctx.critic.values(batch))
        found = run.ctx.compute(run.algorithm.advantages, batch)
        for returns, row in zip(found["returns"], batch["response_ids"], strict=True):
            torch.testing.assert_close(returns, row.float().flip(0).cumsum(0).flip(0))  # lambda 1: the rewards to go
    with TinyRun(GRPO(GRPOConfig(group_size=2, prompts_per_step=2)), tables(**reward)) as run:
        batch = run.ctx.actor.generate(run.ctx.prompts(2).repeat(2))
        batch = batch.join(run.ctx.reward.score(batch))
        assert "token_scores" in batch
        sums = [float(row.sum()) for row in batch["response_ids"]]
        torch.testing.assert_close(torch.as_tensor(batch["scores"].values), torch.tensor(sums))


def test_one_setting_of_several_parts_belongs_to_each(importable):
    from hybridflow.core.errors import ConfigError

    with (
        pytest.raises(ConfigError, match=r"reward\.per_token: belongs to one function; with parts each has its own"),
        TinyRun(GRPO(GRPOConfig(group_size=2, prompts_per_step=2)), tables(parts=PARTS, per_token=True)),
    ):
        pass


def test_what_counts_for_a_whole_response_is_at_the_last_token_that_the_model_wrote(importable):
    parts = [{"name": "own", "function": f"{__name__}:nothing", "per_token": True}, PARTS[1]]
    with TinyRun(GRPO(GRPOConfig(group_size=2, prompts_per_step=4)), tables(parts=parts)) as run:
        batch = run.ctx.actor.generate(run.ctx.prompts(4))
        masks = [torch.ones(len(row), dtype=torch.uint8) for row in batch["response_ids"]]
        for mask in masks:
            mask[len(mask) // 2 + 1 :] = 0  # an environment's
        scored = run.ctx.reward.score(batch.with_columns(loss_mask=tokens(masks, torch.uint8)))
        for each, mask in zip(scored["token_scores"], masks, strict=True):
            want = torch.zeros(len(mask))
            want[len(mask) // 2] = 6.0
            torch.testing.assert_close(each, want)


def nothing(sample):
    return [0.0] * len(sample.response_ids)
