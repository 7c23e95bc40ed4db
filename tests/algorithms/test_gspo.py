"""GSPO: its loss, computed one response at a time in a real run, and by hand."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.steps import Watched, taken

from hybridflow.algorithms.gspo import GSPO, GSPOConfig


class KeptGSPO(Watched, GSPO):
    pass


def test_gspos_loss_is_that_of_responses_computed_one_by_one():
    config = GSPOConfig(prompts_per_step=4, group_size=4, epochs=2, clip_low=0.01, clip_high=0.02)
    found, batch, new, old = taken(KeptGSPO(config), micro_batch_tokens=40)
    advantages = [a[0].item() for a in batch["advantages"]]
    expected, clipped, tokens = 0.0, 0.0, 0
    for n, o, a in zip(new, old, advantages, strict=True):
        ratio = math.exp((sum(n) - sum(o)) / len(n))
        expected += max(-ratio * a, -min(max(ratio, 0.99), 1.02) * a) / len(new)
        clipped, tokens = clipped + len(n) * (not 0.99 <= ratio <= 1.02), tokens + len(n)
    assert found["policy_loss"] == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert found["clip_fraction"] == pytest.approx(clipped / tokens, abs=1e-6)


def test_each_token_carries_the_geometric_mean_of_its_responses_ratios():
    loss = GSPO(
        GSPOConfig(prompts_per_step=1, group_size=2, epochs=2, clip_low=0.5, clip_high=0.5)
    ).losses()["actor"]
    assert loss.reads == ["advantages", "old_logprobs"]
    logprobs = torch.tensor([[2.0, 0.5, 99.0], [4.0, 1.0, 1.0]]).log().requires_grad_()
    batch = {
        "loss_mask": torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 1.0]]), "old_logprobs": torch.zeros(2, 3),
        "advantages": torch.tensor([[3.0, 3.0, 0.0], [1.0, 0.0, 1.0]]),
    }  # fmt: skip
    terms = {
        term.name: term for term in loss(batch, {"logprobs": logprobs, "entropy": torch.ones(2, 3)})
    }
    # sqrt(2 * 0.5) = 1, of which nothing is clipped; sqrt(4 * 1) = 2, clipped to 1.5
    assert terms["policy_loss"].value.tolist() == [
        pytest.approx([-3.0, -3.0, 0.0], abs=1e-6),
        pytest.approx([-1.5, 0.0, -1.5]),
    ]
    assert terms["clip_fraction"].value.tolist() == [[0.0] * 3, [1.0] * 3]
    terms["policy_loss"].value.sum().backward()
    # a token's own gradient, -A times its response's ratio, and none where it is clipped
    assert logprobs.grad.tolist() == [pytest.approx([-3.0, -3.0, 0.0]), [0.0] * 3]
