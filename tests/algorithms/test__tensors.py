"""Masks, dtypes and shapes that the pure functions share: by hand, and against loops in numpy."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.numbers import close, t
from helpers.ragged import SEEDS, Random, ref_mean, run, same, smooth_batch

from hybridflow.algorithms import _tensors, functional as fn


def test_masked_mean_counts_only_unmasked_tokens():
    x, mask = t([1.0, 2.0, 100.0], [6.0, 100.0, 100.0]), t([1, 1, 0], [1, 0, 0])
    close(fn.masked_mean(x, mask), 3.0)  # (1 + 2 + 6) / 3
    close(fn.masked_mean(x, mask, dim=1), [1.5, 6.0])


def test_masked_mean_without_tokens_is_zero_and_has_a_zero_gradient():
    x = torch.tensor([[math.nan, 3.0]], requires_grad=True)
    mean = fn.masked_mean(x, torch.zeros(1, 2))
    mean.backward()
    assert mean.item() == 0.0
    assert x.grad.tolist() == [[0.0, 0.0]]


def test_masked_mean_in_bfloat16_still_counts_thousands_of_tokens():
    # A running bfloat16 sum of ones stops at 256.
    mean = fn.masked_mean(
        torch.ones(4, 1000, dtype=torch.bfloat16), torch.ones(4, 1000, dtype=torch.bfloat16)
    )
    assert mean.dtype == torch.bfloat16
    assert mean.item() == 1.0


@pytest.mark.parametrize("seed", SEEDS)
def test_masked_means_are_those_of_loops(seed):
    r = Random(seed)
    x = r.token(3) + 5
    same(run(fn.masked_mean, x, r.mask), ref_mean(x, r.mask))
    same(
        run(fn.masked_mean, x, r.mask, dim=1),
        [ref_mean(a[None], m[None]) for a, m in zip(x, r.mask, strict=True)],
    )


@pytest.mark.parametrize("seed", range(3))
def test_the_gradient_of_a_masked_mean_is_that_of_finite_differences(seed):
    x, _, weights, mask = smooth_batch(seed)
    assert torch.autograd.gradcheck(lambda x: fn.masked_mean(x * weights, mask), (x,))
    (gradient,) = torch.autograd.grad(fn.masked_mean(x * weights, mask), x)
    torch.testing.assert_close(gradient, weights * mask / mask.sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_a_mask_of_any_type_says_where_it_is_not_zero(dtype):
    mask = _tensors.as_bool(torch.tensor([[1, 0, 1]], dtype=dtype), torch.ones(1, 3))
    assert mask.dtype == torch.bool and mask.tolist() == [[True, False, True]]


def test_a_mask_that_would_be_broadcast_is_refused():
    with pytest.raises(ValueError, match=r"got \(2, 1\) for \(2, 3\)"):
        _tensors.as_bool(torch.ones(2, 1), torch.ones(2, 3))


def test_shapes_that_differ_are_refused_with_every_name():
    _tensors.same_shape("f", a=torch.ones(2), b=torch.zeros(2))
    with pytest.raises(ValueError, match=r"got a \[2\], b \[2, 1\]"):
        _tensors.same_shape("f", a=torch.ones(2), b=torch.ones(2, 1))


@pytest.mark.parametrize(
    ("given", "result", "computed"),
    [
        (torch.bfloat16, torch.bfloat16, torch.float32),
        (torch.float16, torch.float16, torch.float32),
        (torch.float64, torch.float64, torch.float64),
        (torch.int64, torch.float32, torch.float32),
    ],
)
def test_half_precision_is_computed_wide_and_integers_give_float32(given, result, computed):
    x = torch.ones(2, dtype=given)
    assert _tensors.result_dtype(x) == result and _tensors.wide(x).dtype == computed


def test_a_ratio_is_clamped_at_twenty_in_its_logarithm():
    new = torch.tensor([math.log(3.0), 500.0, -500.0])
    close(_tensors.ratio(new, torch.zeros(3)), [3.0, math.exp(20), math.exp(-20)])


def test_an_unknown_name_is_refused_with_those_that_are_allowed():
    with pytest.raises(ValueError, match="f: kind must be one of 'a', 'b', got 3"):
        _tensors.refuse("f", "kind", 3, "a", "b")
