"""Losses of mini-batches on one rank: rows that count, gradients, figures, and how far two sides are apart."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hybridflow.backends.fsdp.backend import FSDPBackend
from hybridflow.backends.fsdp.config import FSDPConfig
from hybridflow.core.contracts.loss import Counts, Loss, Term
from hybridflow.core.contracts.training import OptimizerConfig
from hybridflow.core.values.batch import Batch
from hybridflow.core.values.columns import tokens
from hybridflow.core.workers.gradients import (
    LossPart,
    agree,
    loss_metrics,
    loss_reads,
    mismatch,
    padded_rows,
    staleness,
)
from hybridflow.core.workers.reduction import Tally
from hybridflow.kit.testing import one_rank, reference

PROMPTS = [[1, 2], [3], [4, 5, 6], [7]]
RESPONSES = [[8, 9, 10], [11], [12, 13], [14, 15, 16, 17]]
MASKS = [[1, 1, 0], [0], [1, 1], [1, 0, 0, 1]]
BATCH = Batch({
    "prompt_ids": tokens(PROMPTS), "response_ids": tokens(RESPONSES), "loss_mask": tokens(MASKS, torch.uint8),
    "advantages": tokens([[1.0, -2.0, math.nan], [math.nan], [0.5, 0.5], [3.0, math.nan, math.nan, 1.0]]),
    "group": torch.tensor([0, 0, 1, 1]), "meta": ["a", "b", "c", "d"],
})  # fmt: skip


class Weighted(Loss):
    """Reads a column that is nan wherever the mask is 0."""

    reads = ("advantages",)

    def __call__(self, batch, outputs):
        return [
            Term("pg", -outputs["logprobs"] * batch["advantages"]),
            Term("still", outputs["logprobs"], weight=0.0),
        ]


class Watching(Weighted):
    """Reports only."""

    def __call__(self, batch, outputs):
        return [Term("nll", -outputs["logprobs"], weight=0.0)]


class InGroups(Weighted):
    unit = "group"


@pytest.fixture(scope="module")
def context():
    with one_rank() as context:
        yield context


@pytest.fixture
def backend(context):
    backend = FSDPBackend(reference().spec, FSDPConfig(), OptimizerConfig(), context)
    backend.build()
    return backend


def part(context, loss: Loss, budget: int = 1000, batch: Batch = BATCH) -> LossPart:
    made = LossPart(batch, loss, budget, context)
    agree([made])
    return made


def by_hand() -> torch.Tensor:
    """The loss of Weighted by Hugging Face's model, with a graph: over the 6 tokens with mask 1."""
    total = torch.zeros(())
    for prompt, response, mask, advantages in zip(
        PROMPTS, RESPONSES, MASKS, BATCH["advantages"], strict=True
    ):
        logprobs = reference().outputs(torch.tensor(prompt), torch.tensor(response))["logprobs"]
        kept = torch.tensor(mask).bool()
        total = total - (logprobs[kept] * advantages[kept]).sum()
    return total / 6


@pytest.mark.parametrize("budget", [1000, 6])
def test_the_loss_and_its_gradient_are_those_of_the_whole_mini_batch(context, backend, budget):
    model = reference().model
    model.zero_grad()
    expected = by_hand()
    expected.backward()
    mine = part(context, Weighted(), budget)
    metrics = loss_metrics([mine.run(backend, 1.0, train=True)], context)
    assert (len(mine.micros) > 1) == (budget == 6)
    assert metrics["loss"] == pytest.approx(float(expected.detach()), rel=1e-5)
    assert metrics["pg"] == pytest.approx(metrics["loss"])
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            backend.parameters[name].grad, parameter.grad, atol=1e-5, rtol=1e-4
        )


TREES = Batch({
    "prompt_ids": tokens([[1, 2], [3], [4]]),
    "response_ids": tokens([[8, 9, 10, 11, 12], [13, 14], [5, 6, 7, 15, 16]]),
    "loss_mask": tokens([[1, 1, 0, 1, 1], [1, 0], [1, 0, 0, 1, 1]], torch.uint8),
    "advantages": tokens([[1.0, -2.0, math.nan, 3.0, -4.0], [5.0, math.nan], [6.0, math.nan, math.nan, -7.0, 8.0]]),
    "group": torch.tensor([0, 0, 1]), "record_id": torch.tensor([0, -1, 1], dtype=torch.int32),
    "branches": [[[2, 0], [4, 1]], [], [[1, -2], [4, -1]]],
})  # fmt: skip
STANDS = [
    [([1, 2], 8), ([1, 2, 8], 9), ([1, 2, 8, 10], 11), ([1, 2, 8, 9], 12)],
    [([3], 13)],
    [([4], 5), ([6, 7], 15), ([4], 16)],
]
"""What stands before each token of TREES that is trained on, written out."""


@pytest.mark.parametrize("budget", [1000, 6])
def test_tokens_of_rows_that_branch_are_trained_behind_what_stood_before_them(
    context, backend, budget
):
    model = reference().model
    model.zero_grad()
    logprobs = [
        torch.cat(
            [
                reference().outputs(torch.tensor(before), torch.tensor([token]))["logprobs"]
                for before, token in row
            ]
        )
        for row in STANDS
    ]
    advantages = [torch.tensor(row) for row in ([1.0, -2.0, 3.0, -4.0], [5.0], [6.0, -7.0, 8.0])]
    expected = -sum((one * by).sum() for one, by in zip(logprobs, advantages, strict=True)) / 8
    expected.backward()

    mine = part(context, Weighted(), budget, TREES)
    metrics = loss_metrics([mine.run(backend, 1.0, train=True)], context)
    assert (len(mine.micros) > 1) == (budget == 6)
    assert metrics["loss"] == pytest.approx(float(expected.detach()), rel=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            backend.parameters[name].grad, parameter.grad, atol=1e-5, rtol=1e-4
        )
    # Recorded where they stand in their rows.
    kept = [[True, True, False, True, True], [True, False, False, True, True]]
    for number, row in enumerate((0, 2)):
        recorded = torch.from_numpy(mine.recorded[number])
        torch.testing.assert_close(
            recorded[torch.tensor(kept[number])], logprobs[row].detach(), atol=1e-5, rtol=0
        )


def test_validation_leaves_no_gradients(context, backend):
    metrics = loss_metrics([part(context, Weighted()).run(backend, 1.0, train=False)], context)
    assert metrics["loss"] == pytest.approx(float(by_hand().detach()), rel=1e-5)
    assert all(parameter.grad is None for parameter in backend.parameters.values())


def test_a_loss_of_figures_alone_has_a_gradient_of_zero(context, backend):
    metrics = loss_metrics([part(context, Watching()).run(backend, 1.0, train=True)], context)
    assert metrics["loss"] == 0.0 and metrics["nll"] > 0
    assert all(parameter.grad.abs().max() == 0 for parameter in backend.parameters.values())


def test_a_rank_without_rows_takes_part_with_a_dummy(context, backend):
    none = part(context, Weighted(), batch=BATCH.take(slice(0, 0)))
    assert [micro.dummy for micro in none.micros] == [True]
    assert loss_metrics([none.run(backend, 1.0, train=True)], context)["loss"] == 0.0
    assert all(parameter.grad.abs().max() == 0 for parameter in backend.parameters.values())


def test_rows_without_a_token_to_train_on_are_left_out_but_for_those_of_their_unit(context):
    alone, grouped = part(context, Weighted()), part(context, InGroups())
    assert sorted(np.concatenate(alone.plan).tolist()) == [0, 2, 3]
    assert alone.total == Counts(tokens=6.0, sequences=3.0, units=3.0)
    assert sorted(np.concatenate(grouped.plan).tolist()) == [0, 1, 2, 3]
    assert grouped.total == Counts(tokens=6.0, sequences=3.0, units=2.0)


class WithTopK(Loss):
    reads, needs, unit = ("advantages",), ("topk_logprobs",), "pair"

    def __call__(self, batch, outputs):
        return Term("x", outputs["topk_logprobs"].sum(-1))


def test_an_update_reads_what_its_losses_declare_once():
    base = {"prompt_ids", "response_ids", "loss_mask", "rollout_logprobs", "weight_version"}
    names = loss_reads([(BATCH, Weighted()), (BATCH, WithTopK()), (BATCH, InGroups())])
    names_of_losses = {"advantages", "topk_ids", "pair", "group"}
    assert set(names) == base | names_of_losses | {"record_id", "lag", "branches"}
    assert len(names) == len(set(names))


def test_what_a_loss_is_given_is_padded_and_free_of_what_is_masked():
    columns = {
        name: BATCH[name] for name in ("loss_mask", "advantages", "response_ids", "group", "meta")
    }
    given = padded_rows(columns, np.array([3, 1]), torch.device("cpu"))
    assert given["advantages"].tolist() == [[3.0, 0, 0, 1.0], [0.0, 0, 0, 0]]
    assert (
        given["loss_mask"].tolist() == [[1.0, 0, 0, 1], [0, 0, 0, 0]]
        and given["loss_mask"].dtype == torch.float32
    )
    assert given["response_ids"].tolist() == [[14, 15, 16, 17], [11, 0, 0, 0]]
    assert given["group"].tolist() == [1, 0] and given["meta"] == ["d", "b"]
    assert padded_rows(columns, np.array([1]), torch.device("cpu"), width=3)[
        "advantages"
    ].shape == (1, 3)


def test_the_distance_of_trainer_and_engine_is_over_tokens_of_the_present_weights():
    """Token by token: 0.1 above, 0.2 below; then one that an environment wrote, and one of older weights."""
    rows = {
        "rollout_logprobs": torch.tensor([[-1.0, -2.0, 0.0, -9.0]]),
        "weight_version": torch.tensor([[4, 4, -1, 3]]),
        "loss_mask": torch.tensor([[1.0, 1.0, 0.0, 1.0]]),
    }
    found = mismatch(rows, torch.tensor([[-0.9, -2.2, -5.0, -1.0]]), version=4).metrics()
    assert found["mismatch_mean"] == pytest.approx((0.1 + 0.2) / 2, rel=1e-5)
    k3 = [math.exp(0.1) - 1 - 0.1, math.exp(-0.2) - 1 + 0.2]
    assert found["mismatch_kl"] == pytest.approx(sum(k3) / 2, rel=1e-4)
    assert found["mismatch_max_ratio"] == pytest.approx(math.exp(0.2), rel=1e-5)
    assert not mismatch(rows, torch.zeros(1, 4), version=9).metrics().values()


def test_rows_of_several_versions_are_left_out_where_keys_and_values_stay():
    """Rows of versions 4 and 4, 3 and 4, and 4 and an environment's: the second is left out."""
    rows = {
        "rollout_logprobs": torch.zeros(3, 2),
        "weight_version": torch.tensor([[4, 4], [3, 4], [4, -1]]),
        "loss_mask": torch.tensor([[1.0, 1.0], [1.0, 1.0], [1.0, 0.0]]),
    }
    logprobs = torch.tensor([[0.1, 0.2], [5.0, 7.0], [0.6, 9.0]])
    found = mismatch(rows, logprobs, 4, whole_rows=True).metrics()
    assert found["mismatch_mean"] == pytest.approx((0.1 + 0.2 + 0.6) / 3, rel=1e-5)
    every = mismatch(rows, logprobs, 4).metrics()
    assert every["mismatch_mean"] == pytest.approx((0.1 + 0.2 + 7.0 + 0.6) / 4, rel=1e-5)


def test_how_far_the_policy_has_moved_is_by_lag_and_as_weights():
    """By hand: d = old - rollout is 0.1 and -0.2 in a row that lags by 1, and 0.3 in one that does not."""
    rows = {
        "rollout_logprobs": torch.tensor([[-1.0, -2.0, -9.0], [-1.0, 0.0, 0.0]]),
        "old_logprobs": torch.tensor([[-0.9, -2.2, -1.0], [-0.7, 0.0, 0.0]]),
        "loss_mask": torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]]),
        "lag": torch.tensor([1, 0], dtype=torch.int8),
    }
    found = staleness(rows, torch.zeros(2, 3), [0, 1]).metrics()
    k3 = [math.exp(d) - 1 - d for d in (0.1, -0.2, 0.3)]
    assert found["lag1_kl"] == pytest.approx((k3[0] + k3[1]) / 2, rel=1e-4)
    assert found["lag0_kl"] == pytest.approx(k3[2], rel=1e-4)
    weights = [math.exp(d) for d in (0.1, -0.2, 0.3)]
    assert found["importance_weight"] == pytest.approx(sum(weights) / 3, rel=1e-5)
    squares = sum(weight**2 for weight in weights) / 3
    assert found["importance_weight_square"] == pytest.approx(squares, rel=1e-5)
    # The first row's second token is by newer weights than its first.
    rows["lag"] = torch.tensor([[1, 0, 1], [0, 0, 0]], dtype=torch.int8)
    by_token = staleness(rows, torch.zeros(2, 3), [0, 1]).metrics()
    assert by_token["lag1_kl"] == pytest.approx(k3[0], rel=1e-4)
    assert by_token["lag0_kl"] == pytest.approx((k3[1] + k3[2]) / 2, rel=1e-4)
    # Without old logprobs the loss's own forward pass has them.
    del rows["old_logprobs"]
    own = staleness(rows, rows["rollout_logprobs"], [0, 1]).metrics()
    assert own["lag1_kl"] == own["lag0_kl"] == 0.0 and own["importance_weight"] == 1.0


def test_the_losses_of_several_parts_add_up_to_one_figure(context):
    first, second = Tally(), Tally()
    for tally, value in ((first, 2.0), (second, 3.0)):
        tally.add("loss", torch.tensor(value), 0.0)
        tally.add("nll", torch.tensor(value), 2.0)
    metrics = loss_metrics([first, second], context)
    assert metrics.means == {"loss": (5.0, 1.0), "nll": (5.0, 4.0)}
