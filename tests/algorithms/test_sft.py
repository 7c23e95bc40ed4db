"""Supervised fine-tuning: the loss is the mean over all tokens of the batch, and falls."""

from __future__ import annotations

import pytest
import torch

from hybridflow.algorithms.sft import SFT, NextTokenLoss, SFTConfig
from hybridflow.core.contracts.loss import Counts
from hybridflow.core.workers.reduction import reduce_terms
from hybridflow.kit.testing import TinyRun


def test_the_loss_is_the_mean_over_tokens_not_over_rows():
    mask = torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
    term = NextTokenLoss()({}, {"logprobs": torch.tensor([[-4.0, -9.0, -9.0], [-1.0, -2.0, -3.0]])})
    total, _ = reduce_terms(term, mask, Counts(4, 2, 2), Counts(4, 2, 2))
    assert float(total) == pytest.approx((4 + 1 + 2 + 3) / 4)


def test_the_loss_of_a_step_is_that_of_the_rows_before_it():
    with TinyRun(SFT(SFTConfig(batch_size=6))) as run:
        rows = run.ctx.prompts(6)
        logprobs = run.ctx.actor.logprobs(rows)["old_logprobs"]
        run.ctx.finish()
        run.session.data.set_state(
            {"train": {**run.session.data.state().result()["train"], "position": 0}}
        ).result()
        loss = run.step()["actor/nll"]
    assert len(rows["response_ids"].values) == 6 * 4  # three digits and eos
    assert loss == pytest.approx(float(-logprobs.values.mean()), rel=1e-5)


def test_the_loss_falls():
    with TinyRun(SFT(SFTConfig(batch_size=32)), {"actor": {"optimizer": {"lr": 1e-2}}}) as run:
        losses = [run.step()["actor/loss"] for _ in range(12)]
    assert losses[-1] < 0.7 * losses[0]


def test_it_needs_responses():
    assert SFT.data_columns == ("response_ids",) and SFT(SFTConfig()).updates_per_step() == 1
