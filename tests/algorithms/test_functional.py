"""The pure functions on values worked out by hand, their invariants and their refusals.

The comparison with a reference written from the formulas is in test_functional_reference.py."""

import math
from types import SimpleNamespace

import pytest
import torch

from hybridflow.algorithms import functional as fn

LN2 = math.log(2.0)


def close(got, want, tolerance=1e-6):
    want = torch.as_tensor(want, dtype=got.dtype)
    assert got.shape == want.shape
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def t(*rows):
    """[B, T] of float32."""
    return torch.tensor(rows, dtype=torch.float32)


# ---------------------------------------------------------------------------------------------------- masked statistics


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
    mean = fn.masked_mean(torch.ones(4, 1000, dtype=torch.bfloat16), torch.ones(4, 1000, dtype=torch.bfloat16))
    assert mean.dtype == torch.bfloat16
    assert mean.item() == 1.0


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
    close(fn.whiten(t([0.0, 2e-4]), torch.ones(1, 2)), [[-1 / math.sqrt(3), 1 / math.sqrt(3)]], 1e-5)


def test_whitening_in_float16_does_not_overflow_in_the_squares():
    # 300^2 is beyond float16; mean 0, variance 2 * 300^2
    white = fn.whiten(t([-300.0, 300.0]).half(), torch.ones(1, 2))
    close(white, [[-1 / math.sqrt(2), 1 / math.sqrt(2)]], 1e-3)


# -------------------------------------------------------------------------------------------------- rewards, advantages


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
    close(fn.token_rewards(scores, kl, mask, 2.0), [[0.8, 0.0, 1.4]])  # 1 - 2 * 0.1;  hole;  2 - 2 * 0.3


def test_scores_that_are_neither_one_per_row_nor_one_per_token_are_refused():
    with pytest.raises(ValueError, match=r"score must be \[B\] = \[2\] or \[B, T\] = \[2, 3\], got \(2, 1\)"):
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
    close(fn.group_normalized(scores, group, eps=math.sqrt(2)), [-half / 2, 0.0, half / 2, 0.0, 0.0])


def test_equal_scores_of_a_group_give_exactly_zero():
    # Seven times 0.1 in float32 does not sum to seven tenths: a mean taken naively leaves noise, which eps magnifies.
    scores, group = torch.full((7,), 0.1), torch.zeros(7, dtype=torch.int64)
    assert fn.group_normalized(scores, group).tolist() == [0.0] * 7
    assert fn.leave_one_out(scores, group).tolist() == [0.0] * 7


def test_leave_one_out_subtracts_the_mean_of_the_others():
    scores, group = torch.tensor([1.0, 7.0, 2.0, 6.0]), torch.tensor([5, 1, 5, 5])
    # group 5: 1 - (2 + 6)/2, 2 - (1 + 6)/2, 6 - (1 + 2)/2;  alone: its own score
    close(fn.leave_one_out(scores, group), [-3.0, 7.0, -1.5, 4.5])


def test_groups_of_another_shape_than_the_scores_are_refused():
    for function in (fn.group_normalized, fn.leave_one_out):
        with pytest.raises(ValueError, match=r"both be \[B\], got \(2,\) and \(2, 1\)"):
            function(torch.ones(2), torch.ones(2, 1, dtype=torch.int64))


def test_overlong_punishment_ramps_down_over_the_cache():
    length = torch.tensor([0, 12, 13, 14, 16, 17, 400])
    # limit 16, cache 4: free up to 12, then a quarter per token, -1 from 16
    close(fn.overlong_punishment(length, limit=16, cache=4), [0.0, 0.0, -0.25, -0.5, -1.0, -1.0, -1.0])


@pytest.mark.parametrize(("limit", "cache"), [(16, 0), (16, -1), (16, 17)])
def test_overlong_punishment_refuses_a_cache_that_is_not_part_of_the_limit(limit, cache):
    with pytest.raises(ValueError, match=rf"cache={cache}, limit={limit}"):
        fn.overlong_punishment(torch.tensor([3]), limit, cache)


def test_importance_weights_per_token_are_truncated_or_dropped():
    old, rollout = torch.zeros(1, 4), -t([0.25, 1.0, 4.0, 4.0]).log()  # w = 1/4, 1, 4, and 4 under the mask
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
    weights = fn.importance_weights(torch.zeros(1, 4), -t([1.0, 1.0, 9.0, 9.0]).log(), mask, "mask", 0.5, 2.0)
    close(fn.aggregate(torch.ones(1, 4) * weights, mask, "token-mean"), 0.5)  # 2 kept of 4, not 2 of 2


# ---------------------------------------------------------------------------------------------- policy and value losses


def log_ratios(*values):
    """(logprobs, old_logprobs) whose ratios are these."""
    return t(values).log(), torch.zeros(1, len(values))


def test_policy_ratio_loss_takes_the_pessimistic_side():
    logprobs, old = log_ratios(1.0, 2.0, 2.0, 0.5, 0.5)
    advantages = t([3.0, 1.0, -1.0, 1.0, -1.0])
    # clip to [0.8, 1.3]: -min(3, 3); -min(2, 1.3); -min(-2, -1.3); -min(0.5, 0.8); -min(-0.5, -0.8)
    close(fn.policy_ratio_loss(logprobs, old, advantages, 0.2, 0.3), [[-3.0, -1.3, 2.0, -0.5, 0.8]])


def test_policy_ratio_loss_has_no_gradient_where_the_clip_binds():
    logprobs, old = log_ratios(1.0, 2.0, 2.0, 0.5, 0.5)
    logprobs.requires_grad_()
    fn.policy_ratio_loss(logprobs, old, t([3.0, 1.0, -1.0, 1.0, -1.0]), 0.2, 0.3).sum().backward()
    # -A rho where the unclipped side is taken, else 0
    close(logprobs.grad, [[-3.0, 0.0, 2.0, -0.5, 0.0]])


def test_dual_clip_bounds_the_loss_of_negative_advantages_only():
    logprobs, old = log_ratios(8.0, 8.0, 2.0)
    advantages = t([-1.0, 1.0, -1.0])
    # -min(-8, -1.2) = 8, bounded by 3;  positive: -1.2;  2 is below the bound
    close(fn.policy_ratio_loss(logprobs, old, advantages, 0.2, 0.2, dual_clip=3.0), [[3.0, -1.2, 2.0]])


@pytest.mark.parametrize("bound", [1.0, 0.5, math.nan])
def test_dual_clip_of_one_or_less_is_refused(bound):
    with pytest.raises(ValueError, match="dual_clip must be above 1"):
        fn.policy_ratio_loss(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1), 0.2, 0.2, dual_clip=bound)


def test_zero_advantage_gives_zero_loss_and_zero_gradient_at_any_ratio():
    old, zero = torch.zeros(1, 4), torch.zeros(1, 4)
    for loss in (
        lambda x: fn.policy_ratio_loss(x, old, zero, 0.2, 0.3),
        lambda x: fn.policy_ratio_loss(x, old, zero, 0.2, 0.3, dual_clip=3.0),
        lambda x: fn.sequence_ratio_loss(x, old, zero, torch.ones(1, 4), 0.2, 0.3),
        lambda x: fn.cispo_loss(x, old, zero, 1.0, 0.3),
    ):
        logprobs = torch.tensor([[-300.0, -1.0, 0.0, 300.0]], requires_grad=True)
        value = loss(logprobs)
        value.sum().backward()
        assert value.abs().sum().item() == 0.0
        assert logprobs.grad.abs().sum().item() == 0.0


def test_log_ratios_are_clamped_to_twenty_before_exp():
    far = torch.tensor([[500.0, -500.0]])
    zero, minus, every = torch.zeros(1, 2), -torch.ones(1, 2), torch.ones(1, 2)
    top, bottom = math.exp(20), math.exp(-20)
    close(fn.policy_ratio_loss(far, zero, minus, math.inf, math.inf), [[top, bottom]])
    close(fn.cispo_loss(far, zero, minus, math.inf, math.inf), [[top * 500, -bottom * 500]])
    close(fn.importance_weights(far, zero, every, "mask", 0.0, math.inf), [[top, bottom]])
    close(fn.importance_weights(far.abs(), zero, every, "mask", 0.0, math.inf, level="sequence"), [[top, top]])
    close(fn.sequence_ratio(far.T, zero.T, torch.ones(2, 1)), [top, bottom])
    # d = 20: exp(-20) - 1 + 20;  d = -20: exp(20) - 1 - 20
    close(fn.kl_estimate(far, zero, "k3"), [[bottom + 19, top - 21]])


def test_sequence_ratio_is_the_geometric_mean_of_the_token_ratios():
    logprobs = t([2.0, 1000.0, 8.0], [0.25, 1.0, 1.0], [5.0, 5.0, 5.0]).log()
    mask = t([1, 0, 1], [1, 1, 0], [0, 0, 0])
    # sqrt(2 * 8) = 4;  sqrt(1/4 * 1) = 1/2;  no token: 1
    close(fn.sequence_ratio(logprobs, torch.zeros(3, 3), mask), [4.0, 0.5, 1.0])


def test_sequence_ratio_loss_has_the_sequence_value_and_each_tokens_own_gradient():
    logprobs = t([2.0, 0.5, 8.0], [1.0, 1.0, 1.0]).log().requires_grad_()
    mask, advantages = t([1, 1, 1], [1, 1, 1]), t([-3.0] * 3, [1.0] * 3)
    loss = fn.sequence_ratio_loss(logprobs, torch.zeros(2, 3), advantages, mask, 0.2, 0.2)
    close(loss, [[6.0] * 3, [-1.0] * 3])  # ratio (2 * 1/2 * 8)^(1/3) = 2, of A < 0: not clipped
    loss[0, 1].backward()
    close(logprobs.grad, [[0.0, 6.0, 0.0], [0.0, 0.0, 0.0]])  # d/dlogprob of sg(2) exp(logprob - sg(logprob)) 3


def test_a_sequence_outside_the_clip_loses_the_gradient_of_all_its_tokens():
    logprobs = t([2.0, 0.5, 8.0]).log().requires_grad_()
    loss = fn.sequence_ratio_loss(logprobs, torch.zeros(1, 3), torch.ones(1, 3), torch.ones(1, 3), 0.2, 0.2)
    close(loss, [[-1.2] * 3])
    loss.sum().backward()
    assert logprobs.grad.tolist() == [[0.0, 0.0, 0.0]]


def test_cispo_clips_the_weight_and_keeps_every_gradient():
    logprobs, old = t([-1.0, -2.0, -4.0]).requires_grad_(), t([-1.0, -2.0 - LN2, -4.0 + 2 * LN2])
    advantages = t([1.0, 1.0, -1.0])  # ratios 1, 2, 1/4; with clip 0.2 / 0.5: 1, 1.5, 0.8
    loss = fn.cispo_loss(logprobs, old, advantages, 0.2, 0.5)
    close(loss, [[1.0, 3.0, -3.2]])  # -w A logprob
    loss.sum().backward()
    close(logprobs.grad, [[-1.0, -1.5, 0.8]])  # -w A
    close(fn.cispo_loss(logprobs, old, advantages, 1.0, 0.5), [[1.0, 3.0, -1.0]])  # lower side open: weight 1/4


def test_value_loss_takes_the_worse_of_clipped_and_unclipped():
    values, old, returns = torch.tensor([1.0, 3.0, 3.0]), torch.tensor([0.0, 0.0, 2.9]), torch.tensor([1.0, 4.0, 2.0])
    # clip 0.5: 0.5 max(0, (0.5 - 1)^2);  0.5 max(1, (0.5 - 4)^2);  inside: 0.5 * 1
    close(fn.value_loss(values, old, returns, 0.5), [0.125, 6.125, 0.5])
    close(fn.value_loss(values, old, returns, None), [0.0, 0.5, 0.5])
    close(fn.value_loss(values, None, returns, None), [0.0, 0.5, 0.5])


def test_value_loss_has_no_gradient_where_the_clipped_side_is_taken():
    values = torch.tensor([3.0, 3.0], requires_grad=True)
    fn.value_loss(values, torch.tensor([0.0, 2.9]), torch.tensor([4.0, 2.0]), 0.5).sum().backward()
    assert values.grad.tolist() == [0.0, 1.0]  # inside the clip: v - R


def test_a_value_clip_without_old_values_is_refused():
    with pytest.raises(ValueError, match="needs old_values"):
        fn.value_loss(torch.ones(2), None, torch.ones(2), 0.2)


# ---------------------------------------------------------------------------------------------------- preference losses


def test_bradley_terry_loss_of_equal_scores_is_log_two():
    # sigmoid(ln 3) = 3/4; margin ln 3 undoes it
    chosen, rejected = torch.tensor([1.0, math.log(3.0)]), torch.tensor([1.0, 0.0])
    close(fn.bradley_terry_loss(chosen, rejected), [LN2, math.log(4 / 3)])
    close(fn.bradley_terry_loss(chosen, rejected, margin=math.log(3)), [math.log(4.0), LN2])
    close(fn.bradley_terry_loss(chosen, rejected, margin=torch.tensor([0.0, math.log(3)])), [LN2, LN2])


def test_preference_losses_stay_finite_for_scores_far_apart():
    # -log sigmoid(-1000) = 1000, where log(sigmoid) would be -inf
    low, high = torch.tensor([-500.0]), torch.tensor([500.0])
    close(fn.bradley_terry_loss(low, high), [1000.0])
    close(fn.dpo_loss(low, high, torch.zeros(1), torch.zeros(1), 1.0), [1000.0])


def test_cost_model_loss_asks_for_order_and_for_signs():
    # C_w = ln 3, C_l = 0, w harmful, l harmless: sigmoids 3/4, 3/4, 1/2
    got = fn.cost_model_loss(
        torch.tensor([math.log(3)]), torch.tensor([0.0]), torch.tensor([1.0]), torch.tensor([-1.0])
    )
    close(got, [2 * math.log(4 / 3) + LN2])
    # both harmless: the middle one becomes sigmoid(-ln 3) = 1/4
    got = fn.cost_model_loss(
        torch.tensor([math.log(3)]), torch.tensor([0.0]), torch.tensor([-1.0]), torch.tensor([-1.0])
    )
    close(got, [math.log(4 / 3) + math.log(4.0) + LN2])


def test_dpo_loss_compares_the_gains_over_the_reference():
    # gains: w -1 - -3 = 2, l -4 - -5 = 1; beta ln 3 (2 - 1) = ln 3: -log 3/4
    got = fn.dpo_loss(
        torch.tensor([-1.0]), torch.tensor([-4.0]), torch.tensor([-3.0]), torch.tensor([-5.0]), beta=math.log(3)
    )
    close(got, [math.log(4 / 3)])


# ----------------------------------------------------------------------------------------------------------- reduction

LOSS = torch.tensor([[1.0, 2.0, 3.0], [6.0, math.nan, 8.0], [math.inf, 9.0, 9.0]])
MASK = torch.tensor([[1, 1, 1], [1, 0, 1], [0, 0, 0]])
HOWS = {
    "token-mean": 4.0,  # (1 + 2 + 3 + 6 + 8) / 5
    "seq-mean-token-mean": 4.5,  # (6/3 + 14/2) / 2: the row without tokens is no sequence
    "seq-mean-token-sum": 10.0,  # (6 + 14) / 2
    "seq-mean-token-sum-norm": 2.5,  # 20 / (2 * 4)
}


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int64])
def test_aggregate_by_hand(how, dtype):
    close(fn.aggregate(LOSS, MASK.to(dtype), how, length=4), HOWS[how])


@pytest.mark.parametrize("how", HOWS)
def test_aggregate_with_global_counts_adds_up_over_micro_batches(how):
    counts = SimpleNamespace(tokens=5, sequences=2)
    parts = [fn.aggregate(LOSS[i : i + 1], MASK[i : i + 1], how, counts, length=4) for i in range(3)]
    close(sum(parts), HOWS[how])
    as_tensors = SimpleNamespace(tokens=torch.tensor(5), sequences=torch.tensor(2.0))
    close(fn.aggregate(LOSS, MASK, how, as_tensors, length=4), HOWS[how])


@pytest.mark.parametrize("how", HOWS)
def test_padding_changes_no_aggregate(how):
    loss = torch.nn.functional.pad(LOSS, (0, 5, 0, 2), value=123.0)
    close(fn.aggregate(loss, torch.nn.functional.pad(MASK, (0, 5, 0, 2)), how, length=4), HOWS[how])


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (2, 3), (0, 0)])
def test_aggregate_without_tokens_is_a_zero_that_can_be_differentiated(how, shape):
    x = torch.ones(shape, requires_grad=True)
    total = fn.aggregate(x * 2, torch.zeros(shape), how, length=4)
    total.backward()
    assert total.item() == 0.0
    assert x.grad.abs().sum().item() == 0.0


def test_a_loss_per_row_counts_each_row_as_one_token():
    loss, mask = torch.tensor([1.0, 5.0, 100.0]), torch.tensor([1, 1, 0])
    for how in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum"):
        close(fn.aggregate(loss, mask, how), 3.0)


@pytest.mark.parametrize("length", [None, 0, -1])
def test_the_norm_without_a_constant_length_is_refused(length):
    with pytest.raises(ValueError, match=f"needs a constant length above 0, got {length}"):
        fn.aggregate(LOSS, MASK, "seq-mean-token-sum-norm", length=length)


# ------------------------------------------------------------------------------------------------ what holds for all


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (lambda x: fn.kl_estimate(x, x, "k4"), ["kind", "'k1'", "'abs'", "'k2'", "'k3'", "got 'k4'"]),
        (lambda x: fn.aggregate(x, x, "mean"), ["how", "'token-mean'", "'seq-mean-token-sum-norm'", "got 'mean'"]),
        (
            lambda x: fn.importance_weights(x, x, x, "clip", 0.5, 2.0),
            ["mode", "'truncate'", "'mask'", "got 'clip'"],
        ),
        (
            lambda x: fn.importance_weights(x, x, x, "mask", 0.5, 2.0, level="row"),
            ["level", "'token'", "'sequence'", "got 'row'"],
        ),
        (lambda x: fn.group_normalized(x[0], x[0].long(), scale="var"), ["scale", "'std'", "'none'", "got 'var'"]),
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
        lambda: fn.policy_ratio_loss(X23, X21, X23, 0.2, 0.2),
        lambda: fn.policy_ratio_loss(X21, X21, X2, 0.2, 0.2),
        lambda: fn.sequence_ratio(X23, X21, X23),
        lambda: fn.sequence_ratio_loss(X23, X23, X21, X23, 0.2, 0.2),
        lambda: fn.cispo_loss(X21, X21, X2, 0.2, 0.2),
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
        **{kind: lambda kind=kind: fn.kl_estimate(x, x / 2, kind) for kind in ("k1", "abs", "k2", "k3")},
        "token_rewards": lambda: fn.token_rewards(row, x, mask, 0.1),
        "discounted_returns": lambda: fn.discounted_returns(x, mask, 0.9),
        "gae": lambda: torch.cat(fn.gae(x, x / 2, mask, 0.9, 0.8)),
        "group_normalized": lambda: fn.group_normalized(row, group),
        "leave_one_out": lambda: fn.leave_one_out(row, group),
        "overlong_punishment": lambda: fn.overlong_punishment(row.abs(), 2, 1),
        "truncate": lambda: fn.importance_weights(x, x / 2, mask, "truncate", 0.5, 2.0),
        "mask": lambda: fn.importance_weights(x, x / 2, mask, "mask", 0.5, 2.0, level="sequence"),
        "policy_ratio_loss": lambda: fn.policy_ratio_loss(x, x / 2, x, 0.2, 0.2, dual_clip=3.0),
        "sequence_ratio": lambda: fn.sequence_ratio(x, x / 2, mask),
        "sequence_ratio_loss": lambda: fn.sequence_ratio_loss(x, x / 2, x, mask, 0.2, 0.2),
        "cispo_loss": lambda: fn.cispo_loss(x, x / 2, x, 0.2, 0.2),
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
    covered = set(NAMES) | {"kl_estimate", "importance_weights", "aggregate", "AdaptiveKL", "LagrangeMultiplier"}
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
    results = [calls(*batch(6, 5, mask_dtype=dtype))[name]() for dtype in (torch.bool, torch.float32, torch.int64)]
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


@pytest.mark.parametrize("name", ["whiten", "token_rewards", "discounted_returns", "gae", "truncate", "mask"])
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
    ["whiten", "token_rewards", "discounted_returns", "gae", "group_normalized", "leave_one_out", "truncate", "mask"],
)
def test_rewards_advantages_and_weights_carry_no_graph(name):
    x, mask, row, group = batch(6, 5)
    assert not calls(x.requires_grad_(), mask, row.requires_grad_(), group)[name]().requires_grad


def test_integer_scores_give_float_advantages():
    scores, group = torch.tensor([0, 1, 1, 0]), torch.tensor([0, 0, 1, 1])
    close(fn.group_normalized(scores, group, scale="none"), [-0.5, 0.5, 0.5, -0.5])
    assert fn.leave_one_out(scores, group).tolist() == [-1.0, 1.0, 1.0, -1.0]
