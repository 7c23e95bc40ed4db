"""What holds for every pure function: dtypes, masks, shapes, empty batches, graphs.

What each computes is tested beside its module: test__advantages.py, test__losses.py, test__tensors.py."""

from __future__ import annotations

import math

import pytest
import torch

from hybridflow.algorithms import functional as fn

HOWS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (
            lambda x: fn.kl_estimate(x, x, "k4"),
            ["kind", "'k1'", "'abs'", "'k2'", "'k3'", "got 'k4'"],
        ),
        (
            lambda x: fn.aggregate(x, x, "mean"),
            ["how", "'token-mean'", "'seq-mean-token-sum-norm'", "got 'mean'"],
        ),
        (
            lambda x: fn.divergence_loss(x, x, x, "js", 0.1, 0.1, 20.0),
            ["kind", "'tv'", "'kl'", "got 'js'"],
        ),
        (
            lambda x: fn.importance_weights(x, x, x, "clip", 0.5, 2.0),
            ["mode", "'truncate'", "'mask'", "got 'clip'"],
        ),
        (
            lambda x: fn.importance_weights(x, x, x, "mask", 0.5, 2.0, level="row"),
            ["level", "'token'", "'sequence'", "got 'row'"],
        ),
        (
            lambda x: fn.group_normalized(x[0], x[0].long(), scale="var"),
            ["scale", "'std'", "'none'", "got 'var'"],
        ),
    ],
)
def test_an_unknown_name_is_refused_with_the_names_that_are_allowed(call, names):
    with pytest.raises(ValueError) as error:
        call(torch.ones(2, 3))
    assert all(name in str(error.value) for name in names), str(error.value)


X23, X2, X21 = torch.ones(2, 3), torch.ones(2), torch.ones(2, 1)


@pytest.mark.parametrize(
    "call",
    [
        lambda: fn.masked_mean(X23, X21),
        lambda: fn.whiten(X23, X21),
        lambda: fn.kl_estimate(X23, X21, "k3"),
        lambda: fn.token_rewards(X2, X23, X21, 0.1),
        lambda: fn.discounted_returns(X23, X21, 1.0),
        lambda: fn.gae(X23, X21, X23, 1.0, 1.0),
        lambda: fn.gae(X23, X23, X21, 1.0, 1.0),
        lambda: fn.importance_weights(X23, X21, X23, "mask", 0.5, 2.0),
        lambda: fn.interpolated_logprobs(X23, X21, X2),
        lambda: fn.interpolated_logprobs(X23, X23, X21),
        lambda: fn.policy_ratio_loss(X23, X21, X23, 0.2, 0.2),
        lambda: fn.policy_ratio_loss(X21, X21, X2, 0.2, 0.2),
        lambda: fn.sequence_ratio(X23, X21, X23),
        lambda: fn.sequence_ratio_loss(X23, X23, X21, X23, 0.2, 0.2),
        lambda: fn.cispo_loss(X21, X21, X2, 0.2, 0.2),
        lambda: fn.soft_gate_loss(X23, X23, X21, 1.0, 1.0),
        lambda: fn.geometric_mean_loss(X23, X23, X21, X23, 0.4, 0.4),
        lambda: fn.divergence_loss(X23, X21, X23, "tv", 0.1, 0.1, 20.0),
        lambda: fn.length_weighted(X2, X2.long(), X21),
        lambda: fn.value_loss(X21, X21, X2, 0.2),
        lambda: fn.value_loss(X21, X2, X21, 0.2),
        lambda: fn.bradley_terry_loss(X21, X2),
        lambda: fn.bradley_terry_loss(X2, X2, margin=X21),
        lambda: fn.cost_model_loss(X2, X2, X21, X2),
        lambda: fn.dpo_loss(X2, X2, X2, X21, 0.1),
        lambda: fn.aggregate(X23, X21, "token-mean"),
    ],
)
def test_shapes_that_would_broadcast_are_refused(call):
    with pytest.raises(ValueError, match=r"shape.*got"):
        call()


def calls(x, mask, row, group):
    """Every function on tensors of one dtype, as {name: thunk}."""
    return {
        "masked_mean": lambda: fn.masked_mean(x, mask),
        "whiten": lambda: fn.whiten(x, mask),
        "whiten without shift": lambda: fn.whiten(x, mask, shift_mean=False),
        **{
            kind: lambda kind=kind: fn.kl_estimate(x, x / 2, kind)
            for kind in ("k1", "abs", "k2", "k3")
        },
        "token_rewards": lambda: fn.token_rewards(row, x, mask, 0.1),
        "discounted_returns": lambda: fn.discounted_returns(x, mask, 0.9),
        "without_failed": lambda: fn.without_failed(x, row),
        "gae": lambda: torch.cat(fn.gae(x, x / 2, mask, 0.9, 0.8)),
        "group_normalized": lambda: fn.group_normalized(row, group),
        "leave_one_out": lambda: fn.leave_one_out(row, group),
        "overlong_punishment": lambda: fn.overlong_punishment(row.abs(), 2, 1),
        "truncate": lambda: fn.importance_weights(x, x / 2, mask, "truncate", 0.5, 2.0),
        "mask": lambda: fn.importance_weights(x, x / 2, mask, "mask", 0.5, 2.0, level="sequence"),
        "interpolated_logprobs": lambda: fn.interpolated_logprobs(x, x / 2, group.abs()),
        "policy_ratio_loss": lambda: fn.policy_ratio_loss(x, x / 2, x, 0.2, 0.2, dual_clip=3.0),
        "sequence_ratio": lambda: fn.sequence_ratio(x, x / 2, mask),
        "sequence_ratio_loss": lambda: fn.sequence_ratio_loss(x, x / 2, x, mask, 0.2, 0.2),
        "cispo_loss": lambda: fn.cispo_loss(x, x / 2, x, 0.2, 0.2),
        "soft_gate_loss": lambda: fn.soft_gate_loss(x, x / 2, x, 1.0, 1.05),
        "geometric_mean_loss": lambda: fn.geometric_mean_loss(x, x / 2, x, mask, 0.4, 0.4),
        **{
            f"divergence_loss {kind}": lambda kind=kind: fn.divergence_loss(
                -x.abs(), -x.abs() / 2, x, kind, 0.3, 0.3, 20.0
            )
            for kind in ("tv", "kl")
        },
        "length_weighted": lambda: fn.length_weighted(row, group, row.abs()),
        "value_loss": lambda: fn.value_loss(x, x / 2, x * 2, 0.2),
        "bradley_terry_loss": lambda: fn.bradley_terry_loss(row, row / 2),
        "cost_model_loss": lambda: fn.cost_model_loss(row, row / 2, row.sign(), -row.sign()),
        "dpo_loss": lambda: fn.dpo_loss(row, row / 2, row / 3, row / 4, 0.1),
        **{how: lambda how=how: fn.aggregate(x, mask, how, length=4) for how in HOWS},
    }


def batch(rows, tokens, dtype=torch.float32, mask_dtype=torch.bool):
    generator = torch.Generator().manual_seed(rows * 100 + tokens)
    x = torch.randn(rows, tokens, generator=generator).to(dtype)
    mask = (torch.rand(rows, tokens, generator=generator) < 0.6).to(mask_dtype)
    row = torch.randn(rows, generator=generator).to(dtype)
    return x, mask, row, torch.randint(-2, 2, (rows,), generator=generator) * 7


NAMES = list(calls(*batch(1, 1)))


def test_every_public_function_is_in_the_common_tests():
    covered = set(NAMES) | {
        "kl_estimate",
        "importance_weights",
        "divergence_loss",
        "diverged",
        "aggregate",
        "AdaptiveKL",
        "LagrangeMultiplier",
    }
    assert set(fn.__all__) <= covered


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_dtype_is_preserved_and_half_precision_is_close_to_double(name, dtype):
    x, mask, row, group = batch(6, 5, dtype)
    got = calls(x, mask, row, group)[name]()
    assert got.dtype == dtype
    # The same, already rounded, inputs in double; x / 2 and row / 3 round once more.
    want = calls(x.double(), mask, row.double(), group)[name]()
    tolerance = {torch.bfloat16: 3e-2, torch.float16: 4e-3, torch.float64: 0.0}[dtype]
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", NAMES)
def test_float_bool_and_int_masks_mean_the_same(name):
    results = [
        calls(*batch(6, 5, mask_dtype=dtype))[name]()
        for dtype in (torch.bool, torch.float32, torch.int64)
    ]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("name", NAMES)
def test_inputs_are_not_changed(name):
    inputs = batch(6, 5)
    before = [x.clone() for x in inputs]
    calls(*inputs)[name]()
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0), (3, 4)])
def test_empty_batches_and_rows_without_tokens_give_finite_results(name, shape):
    x, mask, row, group = batch(*shape)
    got = calls(x, torch.zeros_like(mask), row, group)[name]()
    assert torch.isfinite(got).all()
    if got.dim():
        assert got.shape[0] in (shape[0], 2 * shape[0])  # gae's two results are concatenated


@pytest.mark.parametrize(
    "name", ["whiten", "token_rewards", "discounted_returns", "gae", "truncate", "mask"]
)
def test_masked_tokens_get_zero_and_nan_under_the_mask_is_not_read(name):
    x, mask, row, group = batch(6, 5)
    clean = calls(x, mask, row, group)[name]()
    dirty = calls(x.masked_fill(~mask, math.nan), mask, row, group)[name]()
    assert torch.equal(clean, dirty)
    both = torch.cat([mask, mask]) if name == "gae" else mask
    assert clean[~both].abs().sum().item() == 0.0
    assert clean[both].abs().sum().item() > 0.0


@pytest.mark.parametrize(
    "name",
    [
        "whiten",
        "token_rewards",
        "discounted_returns",
        "gae",
        "group_normalized",
        "leave_one_out",
        "truncate",
        "mask",
    ],
)
def test_rewards_advantages_and_weights_carry_no_graph(name):
    x, mask, row, group = batch(6, 5)
    assert not calls(x.requires_grad_(), mask, row.requires_grad_(), group)[name]().requires_grad
