"""Safe RLHF: the multiplier, and the two critics, by hand and in real steps."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from helpers.steps import Watched, column

from hybridflow.algorithms.safe_rlhf import SafeRLHF, SafeRLHFConfig
from hybridflow.kit.testing import TinyRun

TABLE = {
    "cost": {"function": "hybridflow.kit.testing.runs:even_tokens"},
    "reward": {"function": "helpers.pair_rows:odd_tokens"},
}
CONFIG = SafeRLHFConfig(
    prompts_per_step=8, cost_limit=0.2, multiplier_lr=0.5, kl_coef=0.0, value_clip=None
)


class Kept(Watched, SafeRLHF):
    pass


def test_the_advantage_is_the_rewards_less_lambda_times_the_costs():
    algorithm = SafeRLHF(SafeRLHFConfig(multiplier=3.0, kl_coef=0.1, lam=1.0))
    mask, old = torch.ones(1, 2), torch.tensor([[-1.0, -2.0]])
    found = algorithm.lagrangian_advantages(
        scores=torch.tensor([1.0]), costs=torch.tensor([2.0]), values=torch.tensor([[0.5, 0.25]]),
        cost_values=torch.tensor([[1.0, 0.5]]), loss_mask=mask, old_logprobs=old, ref_logprobs=torch.tensor([[-1.5, -1.0]]),
    )  # fmt: skip
    # kl 0.5, -1. rewards -0.05, 1.1: to go 1.05, 1.1. costs 0.05, 1.9: to go 1.95, 1.9
    torch.testing.assert_close(found["returns"], torch.tensor([[1.05, 1.1]]))
    torch.testing.assert_close(found["cost_returns"], torch.tensor([[1.95, 1.9]]))
    want = [[(0.55 - 3 * 0.95) / 4, (0.85 - 3 * 1.4) / 4]]
    torch.testing.assert_close(found["advantages"], torch.tensor(want))
    assert found["lambda"] == pytest.approx(3.0)


def test_the_weight_of_the_kl_does_not_depend_on_lambda():
    moved = []
    for lam in (0.5, 5.0):
        found = []
        for beta in (0.0, 0.1):
            algorithm = SafeRLHF(SafeRLHFConfig(multiplier=lam, kl_coef=beta, lam=1.0))
            zero, one = torch.zeros(1, 1), torch.ones(1)
            given = dict(
                scores=one, costs=one, values=zero, cost_values=zero, loss_mask=torch.ones(1, 1)
            )
            found.append(
                algorithm.lagrangian_advantages(
                    **given, old_logprobs=zero, ref_logprobs=zero - 2.0
                )["advantages"]
            )
        moved.append(float(found[1] - found[0]))
    assert moved == pytest.approx([-0.2, -0.2])  # beta times the KL of 2


def test_the_multiplier_rises_with_the_costs_before_the_advantages_are_made():
    with TinyRun(Kept(CONFIG), TABLE) as run:
        metrics = run.step()
        costs = column(run.algorithm.batch, "costs").double()
    want = math.exp(0.5 * (float(costs.mean()) - 0.2))
    assert metrics["lambda"] == pytest.approx(want, rel=1e-5) and want > 1.0


def test_the_two_critics_learn_from_their_own_scores():
    with TinyRun(Kept(CONFIG), TABLE) as run:
        run.step()
        batch = run.algorithm.batch
    for scores, returns in (("scores", "returns"), ("costs", "cost_returns")):
        ends = np.asarray(batch[returns].lengths) - 1
        last = column(batch, returns)[torch.arange(batch.rows), torch.from_numpy(ends)]
        torch.testing.assert_close(
            last, column(batch, scores), atol=1e-5, rtol=0
        )  # gamma 1: the last one's is the score
