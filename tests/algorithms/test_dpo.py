"""DPO: the loss of pairs by hand, and steps of a real run."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.pair_rows import DATA, log_sigmoid, values
from helpers.steps import column

from hybridflow.algorithms.dpo import DPO, DPOConfig, DPOLoss
from hybridflow.core.contracts.rollout import SamplingParams
from hybridflow.core.errors import ConfigError
from hybridflow.kit.testing import TinyRun

PAIRS = {"data": DATA, "actor": {"micro_batch_tokens": 30, "optimizer": {"lr": 3e-3}}}


def test_the_dpo_loss_by_hand():
    batch = {
        "loss_mask": torch.tensor([[1.0, 1.0], [1.0, 0.0]]), "preferred": torch.tensor([1, 0]),
        "ref_logprobs": torch.tensor([[-1.0, -1.0], [-1.0, -1.0]]),
    }  # fmt: skip
    found = values(DPOLoss(0.5)(batch, {"logprobs": torch.tensor([[-0.5, -0.5], [-2.0, -7.0]])}))
    # gains 1 and -1 (the masked token does not count): 0.5 (1 + 1)
    assert found["dpo_loss"] == [-log_sigmoid(1.0)]
    assert (
        found["margin"] == [1.0]
        and found["accuracy"] == [1.0]
        and found["chosen_logprob"] == [-1.0]
    )


def test_dpo_begins_at_log_two_and_prefers_the_chosen_ones():
    with TinyRun(DPO(DPOConfig(pairs_per_step=4, beta=0.5)), PAIRS) as run:
        metrics = [run.step() for _ in range(24)]
    assert metrics[0]["actor/dpo_loss"] == pytest.approx(
        math.log(2), abs=1e-5
    )  # the policy is the reference
    assert sum(m["actor/accuracy"] for m in metrics[-8:]) / 8 > 0.65
    assert sum(m["actor/dpo_loss"] for m in metrics[-8:]) / 8 < 0.69


def test_the_second_dpo_loss_is_that_of_the_weights():
    with TinyRun(DPO(DPOConfig(pairs_per_step=4, beta=0.5)), PAIRS) as run:
        run.step()
        batch = run.ctx.prompts(4)
        ref, policy = run.ctx.ref.logprobs(batch), run.ctx.actor.logprobs(batch)
        kept = [
            column(b, n)
            for b, n in ((ref, "ref_logprobs"), (policy, "old_logprobs"), (batch, "preferred"))
        ]
        loss = run.ctx.actor.loss(batch.join(ref), DPOLoss(0.5)).result()["loss"]
        run.ctx.finish()
    ref_sum, policy_sum, best = kept[0].sum(-1), kept[1].sum(-1), kept[2].bool()
    gain = (policy_sum - ref_sum)[best] - (policy_sum - ref_sum)[~best]
    assert loss == pytest.approx(
        float(-torch.nn.functional.logsigmoid(0.5 * gain).mean()), rel=1e-4
    )


def test_mini_batches_are_of_whole_pairs():
    algorithm = DPO(DPOConfig(pairs_per_step=4, mini_batch_size=2))
    assert (algorithm.rows_per_step, algorithm.rows_per_update, algorithm.updates_per_step()) == (
        8,
        2,
        4,
    )
    with TinyRun(algorithm, PAIRS) as run:
        run.step()
        assert run.worker("actor").backend.version == 4 and run.worker("ref").backend.version == 0


@pytest.mark.parametrize("size", [3, 10])
def test_a_mini_batch_that_cuts_a_pair_or_is_larger_than_a_step_is_refused(size):
    config = DPOConfig(pairs_per_step=4, mini_batch_size=size)
    [problem] = DPO(config).problems(SamplingParams())
    assert f"mini_batch_size {size} must be even (pairs) and at most the 8 sequences" in problem
    config = DPOConfig(pairs_per_step=4, mini_batch_size=8)
    assert DPO(config).problems(SamplingParams()) == []


def test_data_without_pairs_is_refused():
    with pytest.raises(ConfigError, match=r"data\.rejected: .*worse"):
        TinyRun(DPO(DPOConfig()))
