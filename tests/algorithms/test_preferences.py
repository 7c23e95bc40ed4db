"""Pairs: DPO, reward models and cost models, by hand and in real steps."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.watched import column

from hybridflow.algorithms.cost_model import CostLoss, CostModel, CostModelConfig
from hybridflow.algorithms.dpo import DPO, DPOConfig, DPOLoss
from hybridflow.algorithms.reward_model import PreferenceLoss, RewardModel, RewardModelConfig
from hybridflow.core.errors import ConfigError, DataError
from hybridflow.kit.testing import TinyRun
from hybridflow.kit.testing.runs import TABLES

DATA = {
    "source": "helpers.pair_rows:RightAndWrong", "answer": "{chosen}", "response": "{chosen}",
    "rejected": "{rejected}",
}  # fmt: skip
PAIRS = {"data": DATA, "actor": {"micro_batch_tokens": 30, "optimizer": {"lr": 3e-3}}}
UNSAFE = {**DATA, "unsafe": ["chosen_unsafe", "rejected_unsafe"]}


def values(terms) -> dict[str, list[float]]:
    return {term.name: pytest.approx(term.value.tolist(), rel=1e-5) for term in terms}


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


def test_the_preference_loss_by_hand():
    # pairs (2, 1) and (0, 3), the better one first in one and last in the other
    batch = {"preferred": torch.tensor([1, 0, 0, 1])}
    found = values(PreferenceLoss(margin=0.5)(batch, {"scores": torch.tensor([2.0, 1.0, 0.0, 3.0])}))
    assert found["preference_loss"] == [-log_sigmoid(0.5), -log_sigmoid(2.5)]
    assert found["accuracy"] == [1.0, 1.0]


def test_the_cost_loss_by_hand():
    batch = {"preferred": torch.tensor([1, 0, 1, 0]), "unsafe": torch.tensor([0, 1, 1, 1])}
    costs = torch.tensor([-1.0, 2.0, 0.5, -0.5])
    found = values(CostLoss()(batch, {"scores": costs}))
    # pair 0: worse 2, safer -1, signs +, -: s(3), s(2), s(1).  pair 1: worse -0.5, safer 0.5, both +: s(-1), s(-0.5), s(0.5)
    first = -log_sigmoid(3.0) - log_sigmoid(2.0) - log_sigmoid(1.0)
    second = -log_sigmoid(-1.0) - log_sigmoid(-0.5) - log_sigmoid(0.5)
    assert found["cost_loss"] == [first, second]
    assert found["accuracy"] == [1.0, 0.0] and found["sign_accuracy"] == [1.0, 0.5]


def test_the_dpo_loss_by_hand():
    batch = {
        "loss_mask": torch.tensor([[1.0, 1.0], [1.0, 0.0]]), "preferred": torch.tensor([1, 0]),
        "ref_logprobs": torch.tensor([[-1.0, -1.0], [-1.0, -1.0]]),
    }  # fmt: skip
    found = values(DPOLoss(0.5)(batch, {"logprobs": torch.tensor([[-0.5, -0.5], [-2.0, -7.0]])}))
    # gains 1 and -1 (the masked token does not count): 0.5 (1 + 1)
    assert found["dpo_loss"] == [-log_sigmoid(1.0)]
    assert found["margin"] == [1.0] and found["accuracy"] == [1.0] and found["chosen_logprob"] == [-1.0]


def test_dpo_begins_at_log_two_and_prefers_the_chosen_ones():
    with TinyRun(DPO(DPOConfig(pairs_per_step=4, beta=0.5)), PAIRS) as run:
        metrics = [run.step() for _ in range(24)]
    assert metrics[0]["actor/dpo_loss"] == pytest.approx(math.log(2), abs=1e-5)  # the policy is the reference
    assert sum(m["actor/accuracy"] for m in metrics[-8:]) / 8 > 0.65
    assert sum(m["actor/dpo_loss"] for m in metrics[-8:]) / 8 < 0.69


def test_the_second_dpo_loss_is_that_of_the_weights():
    with TinyRun(DPO(DPOConfig(pairs_per_step=4, beta=0.5)), PAIRS) as run:
        run.step()
        batch = run.ctx.prompts(4)
        ref, policy = run.ctx.ref.logprobs(batch), run.ctx.actor.logprobs(batch)
        kept = [column(b, n) for b, n in ((ref, "ref_logprobs"), (policy, "old_logprobs"), (batch, "preferred"))]
        loss = run.ctx.actor.loss(batch.join(ref), DPOLoss(0.5)).result()["loss"]
        run.ctx.finish()
    ref_sum, policy_sum, best = kept[0].sum(-1), kept[1].sum(-1), kept[2].bool()
    gain = (policy_sum - ref_sum)[best] - (policy_sum - ref_sum)[~best]
    assert loss == pytest.approx(float(-torch.nn.functional.logsigmoid(0.5 * gain).mean()), rel=1e-4)


def test_a_reward_model_learns_the_order_of_pairs():
    tables = {"data": DATA, "reward": {**TABLES["actor"], "micro_batch_tokens": 30, "optimizer": {"lr": 3e-3}}}
    with TinyRun(RewardModel(RewardModelConfig(pairs_per_step=16)), tables) as run:
        metrics = [run.step() for _ in range(16)]
        assert set(run.job.models) == {"reward"}  # no other role is loaded
    assert (
        sum(m["reward/accuracy"] for m in metrics[-4:]) / 4 > sum(m["reward/accuracy"] for m in metrics[:2]) / 2 + 0.2
    )


def test_a_cost_model_learns_the_signs():
    tables = {"data": UNSAFE, "cost": {**TABLES["actor"], "optimizer": {"lr": 1e-2}}}
    with TinyRun(CostModel(CostModelConfig(pairs_per_step=16)), tables) as run:
        metrics = [run.step() for _ in range(24)]
    last = sum(m["cost/sign_accuracy"] for m in metrics[-4:]) / 4
    assert last > sum(m["cost/sign_accuracy"] for m in metrics[:2]) / 2 + 0.15


def test_data_without_pairs_or_signs_is_refused():
    with pytest.raises(ConfigError, match=r"data\.rejected: .*worse"):
        TinyRun(DPO(DPOConfig()))
    with pytest.raises(ConfigError, match=r"data\.unsafe: .*name the two fields"):
        TinyRun(CostModel(CostModelConfig()), {"data": DATA, "cost": TABLES["actor"]})
    with pytest.raises(ConfigError, match=r"data\.unsafe names two fields"):
        TinyRun(CostModel(CostModelConfig()), {"data": {**UNSAFE, "unsafe": ["x"]}, "cost": TABLES["actor"]})
    for fields, said in (
        (["chosen_unsafe", "gone"], "no field 'gone'"),
        (["chosen_unsafe", "chosen"], "true or false"),
    ):
        with pytest.raises(DataError, match=said):
            TinyRun(CostModel(CostModelConfig()), {"data": {**UNSAFE, "unsafe": fields}, "cost": TABLES["actor"]})
    assert "must be even" in DPO(DPOConfig(mini_batch_size=3)).problems()[0]
