"""SAPO: its terms by hand, and a step of a real run."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.batches import plain
from helpers.steps import Watched

from hybridflow.algorithms.sapo import SAPO, SAPOConfig
from hybridflow.kit.testing import TinyRun


class Kept(Watched, SAPO):
    pass


def test_each_token_has_a_gate_of_its_own_by_the_sign_of_its_advantage():
    config = SAPOConfig(prompts_per_step=2, mini_batch_size=8, tau_pos=1.0, tau_neg=2.0)
    loss = SAPO(config).losses()["actor"]
    ratio = 1 + math.log(3)  # sigmoid(log 3) = 3 / 4, sigmoid(2 log 3) = 9 / 10
    batch = {
        "loss_mask": torch.ones(1, 2), "advantages": torch.tensor([[1.0, -1.0]]),
        "old_logprobs": torch.zeros(1, 2),
    }  # fmt: skip
    outputs = {"logprobs": torch.full((1, 2), math.log(ratio)), "entropy": torch.ones(1, 2)}
    policy, *_ = loss(batch, outputs)
    assert (policy.name, policy.how) == ("policy_loss", "seq-mean-token-mean")
    # -4 x 3/4 and 4/2 x 9/10
    assert policy.value.tolist() == [[pytest.approx(-3.0), pytest.approx(1.8)]]


def test_the_only_update_of_a_step_has_the_gate_of_a_ratio_of_one():
    with TinyRun(Kept(SAPOConfig(prompts_per_step=4, group_size=4))) as run:
        metrics = run.step()
        advantages = plain(run.algorithm.batch["advantages"])
    # -(4 / tau) / 2 A: -2 A where it is positive, -2 / 1.05 A elsewhere
    means = [sum(-2 * a / (1.0 if a > 0 else 1.05) for a in row) / len(row) for row in advantages]
    assert metrics["actor/policy_loss"] == pytest.approx(sum(means) / len(means), rel=1e-4)
