"""CISPO: its loss by hand, and a step of a real run."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.batches import plain
from helpers.steps import Watched

from hybridflow.algorithms.cispo import CISPO, CISPOConfig
from hybridflow.core.contracts.loss import Counts
from hybridflow.core.workers.reduction import reduce_terms
from hybridflow.kit.testing import TinyRun


class Kept(Watched, CISPO):
    pass


def test_cispo_keeps_the_gradient_of_every_token_with_a_bounded_weight():
    loss = CISPO(CISPOConfig(clip_high=1.0, mini_batch_size=8, prompts_per_step=2)).losses()[
        "actor"
    ]
    logprobs = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    batch = {
        "loss_mask": torch.ones(1, 2), "advantages": torch.tensor([[1.0, -2.0]]),
        "old_logprobs": torch.tensor([[-1.0 - math.log(4.0), -1.0 + math.log(4.0)]]),
    }  # fmt: skip
    total, _ = reduce_terms(
        loss(batch, {"logprobs": logprobs, "entropy": torch.ones(1, 2)}),
        batch["loss_mask"],
        Counts(2, 1, 1),
        Counts(2, 1, 1),
    )
    # weights 4, cut to 2, and 1/4: (-2 x 1 x -1 - 0.25 x -2 x -1) / 2
    assert float(total.detach()) == pytest.approx((2.0 - 0.5) / 2)
    total.backward()
    assert logprobs.grad.tolist() == [[pytest.approx(-1.0), pytest.approx(0.25)]]


def test_a_step_weighs_each_tokens_logprob_with_its_advantage():
    with TinyRun(Kept(CISPOConfig(prompts_per_step=4, group_size=4))) as run:
        metrics = run.step()
        batch = run.algorithm.batch
    logprobs, advantages = plain(batch["rollout_logprobs"]), plain(batch["advantages"])
    pairs = zip(logprobs, advantages, strict=True)
    each = [-a * p for ps, row in pairs for p, a in zip(ps, row, strict=True)]
    # the ratio is 1 in the only update: -A logprob, mean over tokens
    assert metrics["actor/policy_loss"] == pytest.approx(sum(each) / len(each), rel=1e-3)
    assert metrics["actor/clip_fraction"] == 0.0
