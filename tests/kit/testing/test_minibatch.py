"""A loss on random rows: over any split, with gradients, and with what it reads and changes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hybridflow.core.contracts.loss import Loss, Term
from hybridflow.core.values.columns import tokens
from hybridflow.kit.testing.minibatch import Declared, MiniBatch, Undeclared, count, evaluate
from hybridflow.kit.testing.random_columns import RowShapes, standard_column


class Policy(Loss):
    reads = ("advantages",)

    def __call__(self, batch, outputs):
        return [
            Term("policy", -outputs["logprobs"] * batch["advantages"], weight=2.0),
            Term("size", outputs["logprobs"].detach().abs(), weight=0.0),
        ]


class Pairs(Loss):
    needs = ("scores",)
    unit = "pair"

    def __call__(self, batch, outputs):
        scores = outputs["scores"]
        return Term("pairs", scores[0::2] - scores[1::2], how="unit-mean")


LENGTHS = np.array([2, 1, 3])


@pytest.fixture
def three_rows():
    """Six tokens, of which the mask hides the second and the last."""
    columns = {
        "loss_mask": tokens([[1, 0], [1], [1, 1, 0]], torch.uint8),
        "advantages": tokens([[1.0, 9.0], [2.0], [-1.0, 3.0, 9.0]]),
    }
    outputs = {
        "logprobs": [
            torch.tensor([-1.0, -8.0]),
            torch.tensor([-2.0]),
            torch.tensor([-3.0, -0.5, -8.0]),
        ]
    }
    return MiniBatch(RowShapes(LENGTHS, np.arange(3), "row", torch.Generator()), columns, outputs)


def random_rows(loss, unit="row", size=1, rows=8):
    return MiniBatch.make(loss, RowShapes.random(rows, 5, size, unit, seed=2), standard_column)


@pytest.mark.parametrize("plan", [[[0, 1, 2]], [[2], [0, 1]], [[1], [2], [0]]])
def test_value_gradients_and_figures_are_those_by_hand_however_rows_are_split(three_rows, plan):
    """2 * (1*1 + 2*2 - 3*1 + 0.5*3) / 4 tokens; a gradient is -2 * advantage / 4."""
    found = evaluate(Policy(), three_rows, plan, extra=2)
    assert found.total == pytest.approx(2 * (1 + 4 - 3 + 1.5) / 4)
    rows = [row.tolist() for row in found.gradients["logprobs"]]
    assert rows == [[-0.5, 0.0], [-1.0], [0.5, -1.5, 0.0]]
    assert list(found.term_gradients) == ["policy"]
    unweighted = torch.cat(found.term_gradients["policy"])
    assert unweighted.tolist() == [-0.25, 0, -0.5, 0.25, -0.75, 0]
    assert found.metrics["size"] == pytest.approx((1 + 2 + 3 + 0.5) / 4)
    assert found.metrics["policy"] == pytest.approx((1 + 4 - 3 + 1.5) / 4)


def test_it_tells_what_was_read_and_what_was_changed(three_rows):
    class Clips(Policy):
        def __call__(self, batch, outputs):
            batch["advantages"].clamp_(max=1.0)
            return Term("nothing", batch["advantages"])

    found = evaluate(Clips(), three_rows, [[0, 1, 2]])
    assert found.read == {"advantages"}
    assert found.needed == set()
    assert found.changed == {"advantages"}


def test_counts_are_of_tokens_rows_and_units_that_have_one():
    masks = [torch.tensor(row, dtype=torch.bool) for row in ([1, 1], [0], [1], [0, 0])]
    found = count(masks, np.array([0, 0, 1, 2]))
    assert (found.tokens, found.sequences, found.units) == (3, 2, 2)


def test_what_is_not_declared_is_named_with_its_field():
    declared = Declared({"advantages": 1}, "batch", "reads")
    assert declared["advantages"] == 1 and declared.used == {"advantages"}
    for asked in (lambda: declared["values"], lambda: declared.get("values")):
        with pytest.raises(Undeclared, match=r"batch\['values'\] is not in `reads`"):
            asked()
    with pytest.raises(Undeclared):
        "values" in declared  # noqa: B015  (asking is reading)


def test_a_mini_batch_has_the_columns_and_outputs_that_a_loss_declares():
    assert set(random_rows(Policy()).columns) == {"loss_mask", "advantages"}
    pairs = random_rows(Pairs(), "pair", 2)
    assert set(pairs.columns) == {"loss_mask", "pair"}
    assert [row.shape for row in pairs.outputs["scores"]] == [()] * 8

    class Distils(Loss):
        needs = ("topk_logprobs",)

        def __call__(self, batch, outputs):
            raise NotImplementedError

    assert set(random_rows(Distils()).columns) == {"loss_mask", "topk_ids"}


def test_every_split_has_all_rows_once_and_keeps_units_whole():
    mini = random_rows(Pairs(), "pair", 2, rows=12)
    plans = list(mini.plans())
    assert len(plans) == 5
    assert len({str(plan) for plan in plans}) == 5
    for plan in plans:
        assert sorted(row for rows in plan for row in rows) == list(range(12))
        for rows in plan:
            assert all(rows[at + 1] == rows[at] + 1 for at in range(0, len(rows), 2))
    assert [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]] in plans


def test_garbage_goes_where_the_mask_is_0_and_nowhere_else(three_rows):
    found = three_rows.with_garbage(7.0, 5.0)
    assert torch.cat(found.outputs["logprobs"]).tolist() == [-1, 7, -2, -3, -0.5, 7]
    assert found.columns["advantages"].values.tolist() == [1, 5, 2, -1, 3, 5]
    assert found.columns["loss_mask"].values.tolist() == [1, 0, 1, 1, 1, 0]
    assert torch.cat(three_rows.outputs["logprobs"]).tolist() == [-1, -8, -2, -3, -0.5, -8]


def test_outputs_move_down_and_the_old_ones_where_outputs_would_move_above_0():
    class Ratio(Policy):
        reads = ("advantages", "old_logprobs")

    mini = random_rows(Ratio())
    new = torch.cat(mini.outputs["logprobs"])
    old = mini.columns["old_logprobs"].values
    down = mini.with_outputs_moved(-60.0)
    assert torch.equal(torch.cat(down.outputs["logprobs"]), new - 60)
    assert torch.equal(down.columns["old_logprobs"].values, old)
    up = mini.with_outputs_moved(60.0)
    assert torch.equal(torch.cat(up.outputs["logprobs"]), new)
    assert torch.equal(up.columns["old_logprobs"].values, old - 60)
    assert torch.equal(up.columns["advantages"].values, mini.columns["advantages"].values)


def test_values_move_both_ways_and_entropy_stays():
    class Values(Loss):
        needs = ("values", "entropy")

        def __call__(self, batch, outputs):
            raise NotImplementedError

    mini = random_rows(Values())
    for by in (-60.0, 60.0):
        moved = mini.with_outputs_moved(by)
        found = torch.cat(moved.outputs["values"])
        assert torch.equal(found, torch.cat(mini.outputs["values"]) + by)
        assert moved.outputs["entropy"] == mini.outputs["entropy"]


def test_a_changed_column_leaves_the_first_mini_batch_as_it_was(three_rows):
    found = three_rows.with_column("advantages", lambda values: values * 0)
    assert found.columns["advantages"].values.tolist() == [0] * 6
    assert three_rows.columns["advantages"].values.tolist() == [1, 9, 2, -1, 3, 9]
