"""GSPO's and CISPO's losses, computed one response at a time; and how losses are averaged."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.watched import Watched

from hybridflow.algorithms.cispo import CISPO, CISPOConfig
from hybridflow.algorithms.gspo import GSPO, GSPOConfig
from hybridflow.algorithms.policy import PolicyConfig, PolicyLoss
from hybridflow.core.contracts.loss import Counts
from hybridflow.core.workers.reduction import reduce_terms
from hybridflow.kit.testing import TinyRun


class KeptGSPO(Watched, GSPO):
    pass


def test_gspos_loss_is_that_of_responses_computed_one_by_one():
    config = GSPOConfig(prompts_per_step=4, group_size=4, epochs=2, clip_low=0.01, clip_high=0.02)
    with TinyRun(KeptGSPO(config), {"actor": {"micro_batch_tokens": 40}}) as run:
        run.step()
        batch = run.algorithm.batch
        found = run.ctx.actor.loss(batch, run.algorithm.losses()["actor"]).result()
        now = run.ctx.actor.logprobs(batch)
        new, old = list(now["old_logprobs"]), list(batch["old_logprobs"])
        advantages = [a[0].item() for a in batch["advantages"]]
        run.ctx.finish()
    expected, clipped, tokens = 0.0, 0.0, 0
    for n, o, a in zip(new, old, advantages, strict=True):
        ratio = math.exp(float((n.double() - o.double()).mean()))
        expected += max(-ratio * a, -min(max(ratio, 0.99), 1.02) * a) / len(new)
        clipped, tokens = clipped + len(n) * (not 0.99 <= ratio <= 1.02), tokens + len(n)
    assert found["policy_loss"] == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert found["clip_fraction"] == pytest.approx(clipped / tokens, abs=1e-6)


def test_cispo_keeps_the_gradient_of_every_token_with_a_bounded_weight():
    loss = CISPO(CISPOConfig(clip_high=1.0, mini_batch_size=8, prompts_per_step=2)).losses()["actor"]
    logprobs = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    batch = {
        "loss_mask": torch.ones(1, 2), "advantages": torch.tensor([[1.0, -2.0]]),
        "old_logprobs": torch.tensor([[-1.0 - math.log(4.0), -1.0 + math.log(4.0)]]),
    }  # fmt: skip
    total, _ = reduce_terms(loss(batch, {"logprobs": logprobs}), batch["loss_mask"], Counts(2, 1, 1), Counts(2, 1, 1))
    # weights 4, cut to 2, and 1/4: (-2 x 1 x -1 - 0.25 x -2 x -1) / 2
    assert float(total.detach()) == pytest.approx((2.0 - 0.5) / 2)
    total.backward()
    assert logprobs.grad.tolist() == [[pytest.approx(-1.0), pytest.approx(0.25)]]
    assert "no meaning" in CISPO(CISPOConfig(dual_clip=3.0)).problems()[0]


@pytest.mark.parametrize(
    ("how", "expected"),
    # rows of 1 and 3 tokens with loss 4 and 1, 2, 3 per token; the constant is 5
    [
        ("token-mean", 10 / 4),
        ("seq-mean-token-mean", (4 + 2) / 2),
        ("seq-mean-token-sum", (4 + 6) / 2),
        ("seq-mean-token-sum-norm", (4 + 6) / 5 / 2),
    ],
)
def test_every_term_of_the_policy_loss_has_the_chosen_mean(how, expected):
    mask = torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
    values = torch.tensor([[4.0, 0.0, 0.0], [1.0, 2.0, 3.0]])
    config = PolicyConfig(how=how, length=5, entropy_coef=0.5, kl_kind="abs")
    loss = PolicyLoss(config, on_policy=True, kl_coef=0.25)
    batch = {"loss_mask": mask, "advantages": -values, "ref_logprobs": -1.0 - values}
    outputs = {"logprobs": torch.full((2, 3), -1.0), "entropy": values}
    total, _ = reduce_terms(loss(batch, outputs), mask, Counts(4, 2, 2), Counts(4, 2, 2))
    assert float(total) == pytest.approx(expected * (1 - 0.5 + 0.25))


def test_gspo_has_one_mean():
    with pytest.raises(ValueError, match="how"):
        GSPOConfig(how="token-mean")
