"""DPPO: its terms by hand, and a real run that is off-policy."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.batches import plain
from helpers.steps import Watched, taken

from hybridflow.algorithms.dppo import DPPO, DPPOConfig


class Kept(Watched, DPPO):
    pass


def test_it_measures_from_the_policy_that_generated_and_counts_who_has_left():
    loss = DPPO(DPPOConfig(prompts_per_step=2, group_size=2, clip_high=0.2)).losses()["actor"]
    assert loss.reads == ["advantages", "rollout_logprobs"]
    batch = {
        "loss_mask": torch.ones(1, 3), "advantages": torch.tensor([[2.0, 2.0, -1.0]]),
        "rollout_logprobs": torch.tensor([[0.5, 0.25, 0.5]]).log(),
    }  # fmt: skip
    logprobs = torch.tensor([[0.69, 0.5, 0.34]]).log()
    terms = {t.name: t for t in loss(batch, {"logprobs": logprobs, "entropy": torch.ones(1, 3)})}
    # risen by 0.19 and 0.25 (limit 0.2), fallen by 0.16 (limit 0.15)
    want = [-2 * 1.38 * math.log(0.69), 0.0, 0.0]
    assert terms["policy_loss"].value.tolist() == [pytest.approx(want)]
    assert terms["clip_fraction"].value.tolist() == [[0.0, 1.0, 1.0]]


@pytest.mark.parametrize("divergence", ["tv", "kl"])
def test_the_loss_of_a_run_is_that_of_tokens_computed_one_by_one(divergence):
    config = DPPOConfig(
        prompts_per_step=4, group_size=4, epochs=2, divergence=divergence, clip_low=1e-4, clip_high=1e-4
    )  # fmt: skip
    found, batch, new, old = taken(Kept(config))
    values, left = [], []
    rows = zip(new, old, plain(batch["advantages"]), strict=True)
    for n, o, a in (token for row in rows for token in zip(*row, strict=True)):
        p, q = math.exp(n), math.exp(o)
        far = abs(p - q)
        if divergence == "kl":
            far = q * (o - n) + (1 - q) * math.log((1 - q) / (1 - p))
        left.append(far > 1e-4 and (p > q if a > 0 else p < q))
        values.append(0.0 if left[-1] else -min(p / q, 20.0) * a * n)
    assert 0 < sum(left) < len(left)
    assert found["policy_loss"] == pytest.approx(sum(values) / len(values), rel=2e-3, abs=1e-5)
    assert found["clip_fraction"] == pytest.approx(sum(left) / len(left), abs=0.03)
