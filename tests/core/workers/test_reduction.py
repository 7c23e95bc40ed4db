"""Terms and their reduction: shares of micro-batches add up to what one batch gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from hybridflow.core.contracts.loss import REDUCTIONS, Counts, Term
from hybridflow.core.workers.reduction import Tally, reduce_terms

MASK = torch.tensor([[1.0, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 0, 0]])
COUNTS = Counts(tokens=6.0, sequences=3.0, units=3.0)
VALUE = torch.arange(16.0).view(4, 4) + 1


def reduced(term, counts=COUNTS, mask=MASK):
    total, tally = reduce_terms(term, mask, counts, counts)
    return float(total), tally.metrics()


@pytest.mark.parametrize(
    ("how", "by_hand"),
    [
        ("token-mean", (1 + 2 + 3 + 5 + 13 + 14) / 6),
        ("seq-mean-token-mean", (6 / 3 + 5 / 1 + 27 / 2) / 3),
        ("seq-mean-token-sum", (6 + 5 + 27) / 3),
        ("seq-mean-token-sum-norm", (6 + 5 + 27) / 3 / 8),
    ],
)
def test_per_token_reductions_by_hand(how, by_hand):
    total, metrics = reduced(Term("x", VALUE, how=how, length=8))
    assert total == pytest.approx(by_hand)
    assert metrics["x"] == pytest.approx(by_hand)
    assert metrics.means["x"][1] == (6.0 if how == "token-mean" else 3.0)


def test_unit_mean_divides_by_units_and_its_mask_drops_from_the_numerator_alone():
    value = torch.tensor([1.0, 2.0, 6.0])
    assert reduced(Term("x", value, how="unit-mean"))[0] == 3.0
    assert reduced(Term("x", value, torch.tensor([1.0, 0, 1]), "unit-mean"))[0] == pytest.approx(
        7 / 3
    )


def test_a_narrower_mask_leaves_the_denominator_as_it_is():
    narrow = MASK * (VALUE > 4)
    assert reduced(Term("x", VALUE, narrow))[0] == pytest.approx((5 + 13 + 14) / 6)
    by_row = reduced(Term("x", VALUE, narrow, "seq-mean-token-mean"))[0]
    assert by_row == pytest.approx((0 / 3 + 5 / 1 + 27 / 2) / 3)


def test_maxima_are_reported_over_the_mask_and_not_trained_on():
    total, metrics = reduced([Term("x", VALUE), Term("top", VALUE, how="max", weight=0.0)])
    assert metrics["top"] == 14.0
    assert total == pytest.approx(38 / 6)
    assert "top" not in reduced(Term("top", VALUE, torch.zeros(4, 4), "max", weight=0.0))[1]
    assert (
        "top" not in reduced(Term("top", VALUE[:, :0], how="max", weight=0.0), mask=MASK[:, :0])[1]
    )
    with pytest.raises(ValueError, match=r"reported \(weight=0\)"):
        Term("top", VALUE, how="max")


@pytest.mark.parametrize("how", [h for h in REDUCTIONS if h != "max"])
def test_what_is_not_a_number_outside_the_mask_does_no_harm(how):
    value = (VALUE if how != "unit-mean" else VALUE[:, 0]).clone().requires_grad_()
    mask = MASK if how != "unit-mean" else torch.tensor([1.0, 1, 0, 1])
    with torch.no_grad():
        value[mask == 0] = torch.nan
    total, tally = reduce_terms(Term("x", value, mask, how, length=4), MASK, COUNTS, COUNTS)
    total.backward()
    assert torch.isfinite(total)
    assert torch.isfinite(value.grad).all()
    assert np.isfinite(tally.metrics()["x"])


def test_weights_scale_and_terms_add_up():
    half, both = (
        Term("x", VALUE, weight=0.5),
        [Term("x", VALUE, weight=0.5), Term("y", VALUE, weight=-2.0)],
    )
    single = reduced(Term("x", VALUE))[0]
    assert reduced(half)[0] == pytest.approx(0.5 * single)
    total, metrics = reduced(both)
    assert total == pytest.approx(-1.5 * single)
    assert metrics["x"] == metrics["y"] == pytest.approx(single)  # figures are without weights
    assert metrics.means["loss"] == (pytest.approx(total), 0.0)


def test_terms_of_weight_zero_give_figures_and_no_gradient():
    value = VALUE.clone().requires_grad_()
    total, tally = reduce_terms(Term("x", value, weight=0.0), MASK, COUNTS, COUNTS)
    assert not total.requires_grad
    assert float(total) == 0.0
    assert tally.metrics()["x"] == pytest.approx(38 / 6)


def test_a_mini_batch_without_any_token_gives_zero():
    empty = Counts(0.0, 0.0, 0.0)
    for how in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum"):
        total, metrics = reduced(Term("x", VALUE, how=how), empty, torch.zeros(4, 4))
        assert total == 0.0
        assert "x" not in metrics.values()


@pytest.mark.parametrize(
    ("term", "message"),
    [
        (Term("x", VALUE[:, :2]), r"value has shape \(4, 2\) and mask \(4, 4\)"),
        (Term("x", VALUE[:, 0]), r"value has shape \(4,\) and mask \(4, 4\)"),
        (Term("x", VALUE, how="unit-mean"), r"must be equal, \[U\]"),
        (Term("x", VALUE[0], torch.ones(3), "unit-mean"), r"\(4,\) and mask \(3,\)"),
    ],
)
def test_shapes_that_do_not_fit_are_refused_with_the_term_named(term, message):
    with pytest.raises(ValueError, match=message) as error:
        reduce_terms(term, MASK, COUNTS, COUNTS)
    assert "term 'x'" in str(error.value)


@settings(deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 4))
def test_shares_and_figures_add_up_however_rows_are_split(seed, parts):
    rng = torch.Generator().manual_seed(seed)
    value = torch.randn(6, 5, generator=rng, dtype=torch.float64)
    mask = (torch.rand(6, 5, generator=rng) < 0.6).double()
    per_unit = torch.randn(6, generator=rng, dtype=torch.float64)

    def counts(m):
        rows = float((m.sum(-1) > 0).sum())
        return Counts(float(m.sum()), rows, float(len(m)))

    def terms(rows):
        made = [Term(h, value[rows], how=h, length=7) for h in REDUCTIONS[:4]]
        return [
            *made,
            Term("unit", per_unit[rows], how="unit-mean"),
            Term("top", value[rows], how="max", weight=0.0),
        ]

    whole, figures = reduce_terms(terms(slice(None)), mask, counts(mask), counts(mask))
    together, shares = Tally(), 0.0
    for rows in torch.arange(6).tensor_split(parts):
        share, tally = reduce_terms(terms(rows), mask[rows], counts(mask), counts(mask[rows]))
        together.extend(tally)
        shares += float(share)
    assert shares == pytest.approx(float(whole))
    got, want = together.metrics(), figures.metrics()
    for name in want.means:
        assert got.means[name] == pytest.approx(want.means[name]), name
    assert got.maxima == want.maxima


def test_counts_may_be_tensors_and_are_read_with_the_sums():
    tally = Tally()
    tally.add("x", torch.tensor(3.0), torch.tensor(2))
    tally.add("x", torch.tensor(1.0), 2.0)
    tally.peak("top", torch.tensor([1.0, 5.0, 9.0]), torch.tensor([True, True, False]))
    assert tally.metrics().means == {"x": (4.0, 4.0)}
    assert tally.metrics().maxima == {"top": 5.0}
    assert not Tally().metrics()
