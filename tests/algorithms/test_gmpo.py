"""GMPO: its loss, computed one response at a time in a real run, and by hand."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.steps import Watched, taken

from hybridflow.algorithms.gmpo import GMPO, GMPOConfig


class Kept(Watched, GMPO):
    pass


def test_its_loss_is_that_of_responses_computed_one_by_one():
    config = GMPOConfig(prompts_per_step=4, group_size=4, epochs=2, clip_low=0.02, clip_high=0.03)
    found, batch, new, old = taken(Kept(config), micro_batch_tokens=40)
    advantages = [a[0].item() for a in batch["advantages"]]
    expected, clipped, tokens = 0.0, 0, 0
    for n, o, a in zip(new, old, advantages, strict=True):
        logs = [after - before for after, before in zip(n, o, strict=True)]
        kept = [min(d, 0.03) if a > 0 else max(d, -0.02) for d in logs]
        expected -= a * math.exp(sum(kept) / len(kept)) / len(new)
        clipped += sum(not -0.02 <= d <= 0.03 for d in logs)
        tokens += len(logs)
    assert found["policy_loss"] == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert 0 < clipped < tokens
    assert found["clip_fraction"] == pytest.approx(clipped / tokens, abs=1e-6)


def test_the_limits_are_of_log_ratios_and_the_mean_is_over_responses():
    loss = GMPO(GMPOConfig(prompts_per_step=1, group_size=2, epochs=2)).losses()["actor"]
    assert loss.reads == ["advantages", "old_logprobs"]
    batch = {
        "loss_mask": torch.ones(1, 2), "old_logprobs": torch.zeros(1, 2), "advantages": torch.ones(1, 2),
    }  # fmt: skip
    logprobs = torch.tensor([[0.39, 0.41]])
    terms = {t.name: t for t in loss(batch, {"logprobs": logprobs, "entropy": torch.ones(1, 2)})}
    assert terms["policy_loss"].how == "seq-mean-token-mean"
    assert terms["policy_loss"].value.tolist() == [[pytest.approx(-math.exp(0.395))] * 2]
    assert terms["clip_fraction"].value.tolist() == [[0.0, 1.0]]
