"""From scores to rewards, advantages and weights: by hand, and against loops in float64 numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from helpers.numbers import LN2, close, t
from helpers.ragged import SEEDS, Random, clip, per_token, run, same, smooth_batch

from hybridflow.algorithms import functional as fn


def test_whitened_tokens_have_mean_zero_and_unbiased_variance_one():
    x, mask = t([1.0, 2.0, 77.0], [3.0, 77.0, 77.0]), t([1, 1, 0], [1, 0, 0])
    # 1, 2, 3: mean 2, unbiased variance (1 + 0 + 1) / 2 = 1
    close(fn.whiten(x, mask), [[-1.0, 0.0, 0.0], [1.0, 0.0, 0.0]])


def test_whiten_without_shift_keeps_the_mean():
    x, mask = t([10.0, 20.0, 77.0], [30.0, 77.0, 77.0]), t([1, 1, 0], [1, 0, 0])
    # mean 20, std 10: -1 + 20, 0 + 20, 1 + 20; masked tokens stay 0
    close(fn.whiten(x, mask, shift_mean=False), [[19.0, 20.0, 0.0], [21.0, 0.0, 0.0]])


def test_whitening_a_single_token_gives_zero_not_nan():
    assert fn.whiten(t([5.0, 9.0]), t([1, 0])).tolist() == [[0.0, 0.0]]


def test_whitening_nearly_equal_tokens_is_damped_by_the_epsilon():
    # mean 1e-4, variance 2e-8: 1e-4 / sqrt(2e-8 + 1e-8)
    close(
        fn.whiten(t([0.0, 2e-4]), torch.ones(1, 2)), [[-1 / math.sqrt(3), 1 / math.sqrt(3)]], 1e-5
    )


def test_whitening_in_float16_does_not_overflow_in_the_squares():
    # 300^2 is beyond float16; mean 0, variance 2 * 300^2
    white = fn.whiten(t([-300.0, 300.0]).half(), torch.ones(1, 2))
    close(white, [[-1 / math.sqrt(2), 1 / math.sqrt(2)]], 1e-3)


@pytest.mark.parametrize(
    ("kind", "want"),
    [
        ("k1", [LN2, -LN2]),
        ("abs", [LN2, LN2]),
        ("k2", [LN2**2 / 2, LN2**2 / 2]),
        # d = ln 2: 1/2 - 1 + ln 2;  d = -ln 2: 2 - 1 - ln 2
        ("k3", [LN2 - 0.5, 1.0 - LN2]),
    ],
)
def test_kl_estimates_of_a_token_twice_and_half_as_likely(kind, want):
    close(fn.kl_estimate(t([-1.0, -1.0]), t([-1.0 - LN2, -1.0 + LN2]), kind), [want])


def test_k1_is_refused_as_a_loss_and_the_others_are_not():
    a, b = t([-1.0]), t([-2.0])
    with pytest.raises(ValueError, match=r"k1.*zero.*'k2' or 'k3'"):
        fn.kl_estimate(a, b, "k1", in_loss=True)
    for kind in ("abs", "k2", "k3"):
        close(fn.kl_estimate(a, b, kind, in_loss=True), fn.kl_estimate(a, b, kind))


def test_k2_as_a_loss_pushes_with_the_log_ratio():
    logprobs = torch.tensor([-1.0, -3.0], requires_grad=True)
    fn.kl_estimate(logprobs, torch.tensor([-2.0, -2.0]), "k2", in_loss=True).sum().backward()
    assert logprobs.grad.tolist() == [1.0, -1.0]  # d(d^2 / 2) = d


def test_k3_never_pushes_a_token_further_away_however_unlikely_it_is():
    # Clamping only the exp would leave the gradient +1 of the linear term, of the wrong sign.
    logprobs = torch.tensor([-60.0], requires_grad=True)
    kl = fn.kl_estimate(logprobs, torch.tensor([-1.0]), "k3", in_loss=True)
    kl.sum().backward()
    assert torch.isfinite(kl).all()
    assert logprobs.grad.item() <= 0.0


def test_the_score_falls_on_the_last_unmasked_token_and_the_kl_on_every_one():
    kl = t([0.1, 0.2, 9.0, 0.3], [0.5, 9.0, 9.0, 9.0], [9.0, 9.0, 9.0, 9.0])
    mask = t([1, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0])
    # beta 2: -0.2, -0.4, hole, -0.6 + 1;   -1 - 3;   a row without tokens has nowhere to put its score
    want = [[-0.2, -0.4, 0.0, 0.4], [-4.0, 0.0, 0.0, 0.0], [0.0] * 4]
    close(fn.token_rewards(torch.tensor([1.0, -3.0, 5.0]), kl, mask, 2.0), want)


def test_a_score_of_each_token_falls_on_it_unless_it_is_masked():
    scores, kl, mask = t([1.0, 50.0, 2.0]), t([0.1, 9.0, 0.3]), t([1, 0, 1])
    close(
        fn.token_rewards(scores, kl, mask, 2.0), [[0.8, 0.0, 1.4]]
    )  # 1 - 2 * 0.1;  hole;  2 - 2 * 0.3


def test_scores_that_are_neither_one_per_row_nor_one_per_token_are_refused():
    with pytest.raises(ValueError, match=r"\[B, T\] = \[2, 3\], got \(2, 1\)"):
        fn.token_rewards(torch.ones(2, 1), torch.ones(2, 3), torch.ones(2, 3), 0.1)


def test_discounted_returns_cross_holes_without_a_discount():
    rewards, mask = t([1.0, 99.0, 2.0, 4.0], [8.0, 99.0, 99.0, 99.0]), t([1, 0, 1, 1], [1, 0, 0, 0])
    # 4;  2 + 4/2 = 4;  1 + 4/2 = 3, from token 2 straight to token 0
    close(fn.discounted_returns(rewards, mask, 0.5), [[3.0, 0.0, 4.0, 4.0], [8.0, 0.0, 0.0, 0.0]])


def test_gae_of_three_tokens():
    # gamma 1/2, lam 1/2, V = 1 2 4, r = 0 0 8
    # delta: 8 - 4 = 4;  0 + 4/2 - 2 = 0;  0 + 2/2 - 1 = 0
    # A: 4;  0 + 4/4 = 1;  0 + 1/4
    advantages, returns = fn.gae(t([0.0, 0.0, 8.0]), t([1.0, 2.0, 4.0]), torch.ones(1, 3), 0.5, 0.5)
    close(advantages, [[0.25, 1.0, 4.0]])
    close(returns, [[1.25, 3.0, 8.0]])


def test_gae_is_the_same_with_a_hole_as_with_the_hole_cut_out():
    rewards, values = t([0.0, 50.0, 0.0, 70.0, 8.0, 90.0]), t([1.0, 60.0, 2.0, 80.0, 4.0, 90.0])
    advantages, returns = fn.gae(rewards, values, t([1, 0, 1, 0, 1, 0]), 0.5, 0.5)
    close(advantages, [[0.25, 0.0, 1.0, 0.0, 4.0, 0.0]])  # the values of the test above
    close(returns, [[1.25, 0.0, 3.0, 0.0, 8.0, 0.0]])


def test_gae_does_not_read_what_lies_under_the_mask():
    nan = math.nan
    advantages, returns = fn.gae(t([nan, 1.0, nan]), t([nan, 0.0, nan]), t([0, 1, 0]), 0.9, 0.9)
    assert advantages.tolist() == returns.tolist() == [[0.0, 1.0, 0.0]]


def test_gae_with_lambda_one_returns_the_discounted_rewards():
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 5, 9, generator=generator, dtype=torch.float64)
    mask = torch.rand(5, 9, generator=generator) < 0.6
    _, returns = fn.gae(rewards, values, mask, 0.9, 1.0)
    close(returns, fn.discounted_returns(rewards, mask, 0.9), 1e-12)


def test_group_normalized_with_ids_in_any_order():
    scores, group = torch.tensor([1.0, 7.0, 3.0, 5.0, 5.0]), torch.tensor([90, -4, 90, 3, 3])
    # group 90: 1, 3, mean 2, unbiased std sqrt 2;  a group of one; a group of equals
    half = 1 / math.sqrt(2)
    close(fn.group_normalized(scores, group), [-half, 0.0, half, 0.0, 0.0])
    close(fn.group_normalized(scores, group, scale="none"), [-1.0, 0.0, 1.0, 0.0, 0.0])
    # with eps = sqrt 2 the divisor doubles
    close(
        fn.group_normalized(scores, group, eps=math.sqrt(2)), [-half / 2, 0.0, half / 2, 0.0, 0.0]
    )


def test_equal_scores_of_a_group_give_exactly_zero():
    # Seven times 0.1 in float32 does not sum to seven tenths: a mean taken naively leaves noise, which eps magnifies.
    scores, group = torch.full((7,), 0.1), torch.zeros(7, dtype=torch.int64)
    assert fn.group_normalized(scores, group).tolist() == [0.0] * 7
    assert fn.leave_one_out(scores, group).tolist() == [0.0] * 7
    lengths = torch.tensor([3.0, 1, 4, 1, 5, 9, 2])
    assert fn.length_weighted(scores, group, lengths).tolist() == [0.0] * 7


def test_a_length_weighted_baseline_leaves_out_what_has_failed():
    scores = torch.tensor([1.0, 0.0, 7.0, math.nan, math.nan])
    group, lengths = torch.tensor([5, 5, 1, 5, 2]), torch.tensor([1, 3, 9, 50, 1])
    # group 5: (1 x 1 + 3 x 0) / 4; alone: its own score
    close(fn.length_weighted(scores, group, lengths), [0.75, -0.25, 0.0, 0.0, 0.0])
    none = torch.zeros(2, dtype=torch.int64)  # no token, no weight
    close(fn.length_weighted(torch.tensor([1.0, 3.0]), none, none), [0.0, 2.0])


def test_leave_one_out_subtracts_the_mean_of_the_others():
    scores, group = torch.tensor([1.0, 7.0, 2.0, 6.0]), torch.tensor([5, 1, 5, 5])
    # group 5: 1 - (2 + 6)/2, 2 - (1 + 6)/2, 6 - (1 + 2)/2;  alone: its own score
    close(fn.leave_one_out(scores, group), [-3.0, 7.0, -1.5, 4.5])


def test_groups_of_another_shape_than_the_scores_are_refused():
    for function in (
        fn.group_normalized,
        fn.leave_one_out,
        lambda scores, group: fn.length_weighted(scores, group, scores),
    ):
        with pytest.raises(ValueError, match=r"both be \[B\], got \(2,\) and \(2, 1\)"):
            function(torch.ones(2), torch.ones(2, 1, dtype=torch.int64))


def test_overlong_punishment_ramps_down_over_the_cache():
    length = torch.tensor([0, 12, 13, 14, 16, 17, 400])
    # limit 16, cache 4: free up to 12, then a quarter per token, -1 from 16
    close(
        fn.overlong_punishment(length, limit=16, cache=4), [0.0, 0.0, -0.25, -0.5, -1.0, -1.0, -1.0]
    )


@pytest.mark.parametrize(("limit", "cache"), [(16, 0), (16, -1), (16, 17)])
def test_overlong_punishment_refuses_a_cache_that_is_not_part_of_the_limit(limit, cache):
    with pytest.raises(ValueError, match=rf"cache={cache}, limit={limit}"):
        fn.overlong_punishment(torch.tensor([3]), limit, cache)


def test_importance_weights_per_token_are_truncated_or_dropped():
    old, rollout = (
        torch.zeros(1, 4),
        -t([0.25, 1.0, 4.0, 4.0]).log(),
    )  # w = 1/4, 1, 4, and 4 under the mask
    mask = t([1, 1, 1, 0])
    close(fn.importance_weights(old, rollout, mask, "truncate", 0.5, 2.0), [[0.25, 1.0, 2.0, 0.0]])
    close(fn.importance_weights(old, rollout, mask, "mask", 0.5, 2.0), [[0.0, 1.0, 0.0, 0.0]])
    close(fn.importance_weights(old, rollout, mask, "mask", 0.2, 5.0), [[0.25, 1.0, 4.0, 0.0]])


def test_importance_weights_on_the_bounds_are_kept():
    x = torch.zeros(1, 2)  # w = 1
    assert fn.importance_weights(x, x, torch.ones(1, 2), "mask", 1.0, 1.0).tolist() == [[1.0, 1.0]]


def test_importance_weights_of_a_sequence_are_the_product_over_its_tokens():
    old = torch.zeros(2, 3)
    rollout = -t([2.0, 1000.0, 0.75], [2.0, 2.0, 1.0]).log()
    mask = t([1, 0, 1], [1, 1, 1])  # products 1.5 and 4
    truncated = fn.importance_weights(old, rollout, mask, "truncate", 0.5, 2.0, level="sequence")
    close(truncated, [[1.5, 0.0, 1.5], [2.0, 2.0, 2.0]])
    kept = fn.importance_weights(old, rollout, mask, "mask", 0.5, 2.0, level="sequence")
    close(kept, [[1.5, 0.0, 1.5], [0.0, 0.0, 0.0]])


def test_tokens_dropped_by_importance_weights_stay_in_the_denominator():
    mask = torch.ones(1, 4)
    weights = fn.importance_weights(
        torch.zeros(1, 4), -t([1.0, 1.0, 9.0, 9.0]).log(), mask, "mask", 0.5, 2.0
    )
    close(
        fn.aggregate(torch.ones(1, 4) * weights, mask, "token-mean"), 0.5
    )  # 2 kept of 4, not 2 of 2


def test_integer_scores_give_float_advantages():
    scores, group = torch.tensor([0, 1, 1, 0]), torch.tensor([0, 0, 1, 1])
    close(fn.group_normalized(scores, group, scale="none"), [-0.5, 0.5, 0.5, -0.5])
    assert fn.leave_one_out(scores, group).tolist() == [-1.0, 1.0, 1.0, -1.0]


def test_weights_and_k3_are_clamped_at_log_ratios_of_twenty():
    far = torch.tensor([[500.0, -500.0]])
    zero, every = torch.zeros(1, 2), torch.ones(1, 2)
    top, bottom = math.exp(20), math.exp(-20)
    close(fn.importance_weights(far, zero, every, "mask", 0.0, math.inf), [[top, bottom]])
    close(
        fn.importance_weights(far.abs(), zero, every, "mask", 0.0, math.inf, level="sequence"),
        [[top, top]],
    )
    # d = 20: exp(-20) - 1 + 20;  d = -20: exp(20) - 1 - 20
    close(fn.kl_estimate(far, zero, "k3"), [[bottom + 19, top - 21]])


# Against loops


def ref_whiten(x, mask, shift_mean):
    kept = [x[i, j] for i, j in np.ndindex(*x.shape) if mask[i, j]]
    out = np.zeros_like(x)
    mean = sum(kept) / len(kept) if kept else 0.0
    var = sum((k - mean) ** 2 for k in kept) / (len(kept) - 1) if len(kept) > 1 else 0.0
    for i, j in np.ndindex(*x.shape):
        if mask[i, j]:
            out[i, j] = (x[i, j] - mean) / math.sqrt(var + 1e-8) + (0 if shift_mean else mean)
    return out


def ref_token_rewards(score, kl, mask, beta):
    out = np.zeros_like(kl)
    for i in range(len(kl)):
        produced = [j for j in range(kl.shape[1]) if mask[i, j]]
        for j in produced:
            own = score[i, j] if score.ndim == 2 else score[i] if j == produced[-1] else 0.0
            out[i, j] = -beta * kl[i, j] + own
    return out


def ref_returns(rewards, mask, gamma):
    out = np.zeros_like(rewards)
    for i in range(len(rewards)):
        produced = [j for j in range(rewards.shape[1]) if mask[i, j]]
        for k, j in enumerate(produced):
            out[i, j] = sum(gamma**n * rewards[i, later] for n, later in enumerate(produced[k:]))
    return out


def ref_gae(rewards, values, mask, gamma, lam):
    """A_t = sum_l (gamma lam)^l delta_{t+l}: the sum, not the recursion."""
    advantages, returns = np.zeros_like(rewards), np.zeros_like(rewards)
    for i in range(len(rewards)):
        produced = [j for j in range(rewards.shape[1]) if mask[i, j]]
        v = [values[i, j] for j in produced] + [0.0]
        delta = [rewards[i, j] + gamma * v[k + 1] - v[k] for k, j in enumerate(produced)]
        for k, j in enumerate(produced):
            advantages[i, j] = sum((gamma * lam) ** n * d for n, d in enumerate(delta[k:]))
            returns[i, j] = advantages[i, j] + values[i, j]
    return advantages, returns


def ref_group_normalized(scores, group, scale, eps):
    out = np.zeros_like(scores)
    for i in range(len(scores)):
        members = [scores[k] for k in range(len(scores)) if group[k] == group[i]]
        if len(members) > 1:
            out[i] = scores[i] - np.mean(members)
            if scale == "std":
                out[i] /= np.std(members, ddof=1) + eps
    return out


def ref_leave_one_out(scores, group):
    out = np.zeros_like(scores)
    for i in range(len(scores)):
        others = [scores[k] for k in range(len(scores)) if group[k] == group[i] and k != i]
        out[i] = scores[i] - (np.mean(others) if others else 0.0)
    return out


def ref_length_weighted(scores, group, lengths):
    out = np.zeros_like(scores)
    for i in range(len(scores)):
        mine = [k for k in range(len(scores)) if group[k] == group[i]]
        out[i] = scores[i] - np.average(
            [scores[k] for k in mine], weights=[lengths[k] for k in mine]
        )
    return out


def ref_weights(old, rollout, mask, mode, low, high, level):
    out = np.zeros_like(old)
    for i, j in np.ndindex(*old.shape):
        if mask[i, j]:
            log_ratio = old[i, j] - rollout[i, j]
            if level == "sequence":
                log_ratio = sum(
                    old[i, k] - rollout[i, k] for k in range(old.shape[1]) if mask[i, k]
                )
            w = math.exp(clip(log_ratio, -20, 20))
            out[i, j] = min(w, high) if mode == "truncate" else (w if low <= w <= high else 0.0)
    return out


@pytest.mark.parametrize("seed", SEEDS)
def test_whitened_tokens_are_those_of_the_reference(seed):
    r = Random(seed)
    x = r.token(3) + 5
    for shift in (True, False):
        same(run(fn.whiten, x, r.mask, shift), ref_whiten(x, r.mask, shift))


@pytest.mark.parametrize("seed", SEEDS)
def test_rewards_and_returns_are_those_of_the_reference(seed):
    r = Random(seed)
    score, kl, rewards, values = r.row(), r.token(), r.token(), r.token()
    same(run(fn.token_rewards, score, kl, r.mask, 0.3), ref_token_rewards(score, kl, r.mask, 0.3))
    same(run(fn.token_rewards, 2 * kl, kl, r.mask, 0.3), ref_token_rewards(2 * kl, kl, r.mask, 0.3))
    for gamma, lam in ((1.0, 1.0), (0.9, 0.8), (0.5, 0.0), (0.0, 1.0)):
        same(
            run(fn.discounted_returns, rewards, r.mask, gamma), ref_returns(rewards, r.mask, gamma)
        )
        got = run(fn.gae, rewards, values, r.mask, gamma, lam)
        want = ref_gae(rewards, values, r.mask, gamma, lam)
        same(got[0], want[0])
        same(got[1], want[1])


@pytest.mark.parametrize("seed", SEEDS)
def test_group_baselines_are_those_of_the_reference(seed):
    r = Random(seed)
    scores = r.row()
    for scale, eps in (("std", 1e-6), ("std", 0.5), ("none", 1e-6)):
        got = run(fn.group_normalized, scores, r.group, scale, eps)
        same(got, ref_group_normalized(scores, r.group, scale, eps))
    same(run(fn.leave_one_out, scores, r.group), ref_leave_one_out(scores, r.group))
    lengths = r.rng.integers(1, 40, r.rows)
    got = run(fn.length_weighted, scores, r.group, lengths)
    same(got, ref_length_weighted(scores, r.group, lengths))
    length = r.rng.integers(0, 40, r.rows)
    want = [0.0 if n <= 20 else (20 - n) / 10 if n <= 30 else -1.0 for n in length]
    same(run(fn.overlong_punishment, length, 30, 10), want)


@pytest.mark.parametrize("seed", SEEDS)
def test_importance_weights_are_those_of_the_reference(seed):
    r = Random(seed)
    old, rollout = r.token(), r.token()
    for mode in ("truncate", "mask"):
        for level in ("token", "sequence"):
            got = run(fn.importance_weights, old, rollout, r.mask, mode, 0.4, 2.5, level=level)
            same(got, ref_weights(old, rollout, r.mask, mode, 0.4, 2.5, level))


KINDS = {
    "k1": lambda d: d,
    "abs": abs,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: math.exp(-clip(d, -20, 20)) - 1 + clip(d, -20, 20),
}


@pytest.mark.parametrize("scale", [0.5, 15.0])  # 15: many log ratios beyond the clamp
@pytest.mark.parametrize("seed", SEEDS)
def test_kl_estimates_are_those_of_the_reference(seed, scale):
    r = Random(seed)
    logprobs, ref = r.token(scale), r.token(scale)
    for kind, formula in KINDS.items():
        want = per_token(lambda a, b, f=formula: f(a - b), logprobs, ref)
        same(run(fn.kl_estimate, logprobs, ref, kind), want)


@pytest.mark.parametrize("kind", ["abs", "k2", "k3"])
@pytest.mark.parametrize("seed", range(3))
def test_the_gradient_of_a_kl_term_is_that_of_finite_differences(kind, seed):
    logprobs, ref, _, _ = smooth_batch(seed)
    assert torch.autograd.gradcheck(
        lambda x: fn.kl_estimate(x, ref, kind, in_loss=True), (logprobs,)
    )
    (gradient,) = torch.autograd.grad(
        fn.kl_estimate(logprobs, ref, kind, in_loss=True).sum(), logprobs
    )
    assert gradient.abs().sum() > 0


def test_k2s_expected_gradient_is_that_of_the_reverse_kl_and_k1s_is_zero():
    # Three tokens, expectation over the policy taken exactly, samples not differentiated.
    logits = torch.tensor([0.3, -0.8, 0.5], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64).log()
    logprobs = logits.log_softmax(0)
    p = logprobs.detach().exp()
    (want,) = torch.autograd.grad(
        (logprobs.exp() * (logprobs - ref)).sum(), logits, retain_graph=True
    )
    (k2,) = torch.autograd.grad(
        (p * fn.kl_estimate(logprobs, ref, "k2")).sum(), logits, retain_graph=True
    )
    (k1,) = torch.autograd.grad((p * fn.kl_estimate(logprobs, ref, "k1")).sum(), logits)
    torch.testing.assert_close(k2, want)
    assert want.abs().max() > 0.1
    assert k1.abs().max() < 1e-12


def test_k1_and_k3_have_the_kl_as_their_expectation():
    p, q = (
        torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64),
        torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64),
    )
    kl = sum(a * math.log(a / b) for a, b in zip(p.tolist(), q.tolist(), strict=True))
    for kind in ("k1", "k3"):
        assert (p * fn.kl_estimate(p.log(), q.log(), kind)).sum().item() == pytest.approx(
            kl, rel=1e-12
        )
