"""Losses per token and per pair, and their mean: by hand, against loops in float64 numpy, and by finite differences."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.numbers import LN2, close, log_ratios, t
from helpers.ragged import (
    SEEDS,
    Random,
    clip,
    log_sigmoid,
    per_token,
    ref_mean,
    run,
    same,
    smooth_batch,
)

from hybridflow.algorithms import functional as fn

LOSS = torch.tensor([[1.0, 2.0, 3.0], [6.0, math.nan, 8.0], [math.inf, 9.0, 9.0]])
MASK = torch.tensor([[1, 1, 1], [1, 0, 1], [0, 0, 0]])
HOWS = {
    "token-mean": 4.0,  # (1 + 2 + 3 + 6 + 8) / 5
    "seq-mean-token-mean": 4.5,  # (6/3 + 14/2) / 2: the row without tokens is no sequence
    "seq-mean-token-sum": 10.0,  # (6 + 14) / 2
    "seq-mean-token-sum-norm": 2.5,  # 20 / (2 * 4)
}


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
    close(
        fn.policy_ratio_loss(logprobs, old, advantages, 0.2, 0.2, dual_clip=3.0), [[3.0, -1.2, 2.0]]
    )


@pytest.mark.parametrize("bound", [1.0, 0.5, math.nan])
def test_dual_clip_of_one_or_less_is_refused(bound):
    with pytest.raises(ValueError, match="dual_clip must be above 1"):
        fn.policy_ratio_loss(
            torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1), 0.2, 0.2, dual_clip=bound
        )


def test_zero_advantage_gives_zero_loss_and_zero_gradient_at_any_ratio():
    old, zero = torch.zeros(1, 4), torch.zeros(1, 4)
    for loss in (
        lambda x: fn.policy_ratio_loss(x, old, zero, 0.2, 0.3),
        lambda x: fn.policy_ratio_loss(x, old, zero, 0.2, 0.3, dual_clip=3.0),
        lambda x: fn.sequence_ratio_loss(x, old, zero, torch.ones(1, 4), 0.2, 0.3),
        lambda x: fn.cispo_loss(x, old, zero, 1.0, 0.3),
        lambda x: fn.soft_gate_loss(x, old, zero, 1.0, 1.05),
        lambda x: fn.geometric_mean_loss(x, old, zero, torch.ones(1, 4), 0.4, 0.4),
        lambda x: fn.divergence_loss(x.clamp(max=0), old, zero, "tv", 0.1, 0.1, 20.0),
        lambda x: fn.divergence_loss(x.clamp(max=0), old, zero, "kl", 0.1, 0.1, 20.0),
    ):
        logprobs = torch.tensor([[-300.0, -1.0, 0.0, 300.0]], requires_grad=True)
        value = loss(logprobs)
        value.sum().backward()
        assert value.abs().sum().item() == 0.0
        assert logprobs.grad.abs().sum().item() == 0.0


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
    close(
        logprobs.grad, [[0.0, 6.0, 0.0], [0.0, 0.0, 0.0]]
    )  # d/dlogprob of sg(2) exp(logprob - sg(logprob)) 3


def test_a_sequence_outside_the_clip_loses_the_gradient_of_all_its_tokens():
    logprobs = t([2.0, 0.5, 8.0]).log().requires_grad_()
    loss = fn.sequence_ratio_loss(
        logprobs, torch.zeros(1, 3), torch.ones(1, 3), torch.ones(1, 3), 0.2, 0.2
    )
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
    close(
        fn.cispo_loss(logprobs, old, advantages, 1.0, 0.5), [[1.0, 3.0, -1.0]]
    )  # lower side open: weight 1/4


def test_value_loss_takes_the_worse_of_clipped_and_unclipped():
    values, old, returns = (
        torch.tensor([1.0, 3.0, 3.0]),
        torch.tensor([0.0, 0.0, 2.9]),
        torch.tensor([1.0, 4.0, 2.0]),
    )
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


def test_bradley_terry_loss_of_equal_scores_is_log_two():
    # sigmoid(ln 3) = 3/4; margin ln 3 undoes it
    chosen, rejected = torch.tensor([1.0, math.log(3.0)]), torch.tensor([1.0, 0.0])
    close(fn.bradley_terry_loss(chosen, rejected), [LN2, math.log(4 / 3)])
    close(fn.bradley_terry_loss(chosen, rejected, margin=math.log(3)), [math.log(4.0), LN2])
    close(
        fn.bradley_terry_loss(chosen, rejected, margin=torch.tensor([0.0, math.log(3)])), [LN2, LN2]
    )


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
        torch.tensor([-1.0]),
        torch.tensor([-4.0]),
        torch.tensor([-3.0]),
        torch.tensor([-5.0]),
        beta=math.log(3),
    )
    close(got, [math.log(4 / 3)])


def test_ratios_of_losses_are_clamped_at_twenty_in_their_logarithm():
    far = torch.tensor([[500.0, -500.0]])
    zero, minus = torch.zeros(1, 2), -torch.ones(1, 2)
    top, bottom = math.exp(20), math.exp(-20)
    close(fn.policy_ratio_loss(far, zero, minus, math.inf, math.inf), [[top, bottom]])
    close(fn.cispo_loss(far, zero, minus, math.inf, math.inf), [[top * 500, -bottom * 500]])
    close(fn.sequence_ratio(far.T, zero.T, torch.ones(2, 1)), [top, bottom])


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int64])
def test_aggregate_by_hand(how, dtype):
    close(fn.aggregate(LOSS, MASK.to(dtype), how, length=4), HOWS[how])


@pytest.mark.parametrize("how", HOWS)
def test_aggregate_with_global_counts_adds_up_over_micro_batches(how):
    counts = SimpleNamespace(tokens=5, sequences=2)
    parts = [
        fn.aggregate(LOSS[i : i + 1], MASK[i : i + 1], how, counts, length=4) for i in range(3)
    ]
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


def test_a_soft_gate_is_steepest_on_policy_and_has_a_temperature_for_each_sign():
    logprobs, old = log_ratios(1.0, 1.0, 3.0, 3.0)
    logprobs.requires_grad_()
    loss = fn.soft_gate_loss(logprobs, old, t([2.0, -2.0, 1.0, -1.0]), 1.0, 2.0)
    # 4 / tau sigmoid(tau (rho - 1)): at 1 it is 2 / tau, so -2 x 2 and 2 x 1;
    # at 3 sigmoid(2) = 0.880797 and sigmoid(4) = 0.982014
    close(loss, [[-4.0, 2.0, -4 * 0.8807970779, 2 * 0.9820137900]])
    loss.sum().backward()
    # d/dlogprob = -A rho 4 s (1 - s): s = 1/2 gives -A, however large tau is
    s, z = 0.8807970779, 0.9820137900
    close(logprobs.grad, [[-2.0, 2.0, -3 * 4 * s * (1 - s), 3 * 4 * z * (1 - z)]])


@pytest.mark.parametrize("taus", [(0.0, 1.0), (1.0, -1.0), (1.0, math.nan)])
def test_a_soft_gate_needs_temperatures_above_0(taus):
    one = torch.ones(1, 1)
    with pytest.raises(ValueError, match="tau must be above 0, got"):
        fn.soft_gate_loss(one, one, one, *taus)


def test_a_geometric_mean_is_of_ratios_that_are_clipped_on_the_pessimistic_side():
    logprobs = t([1.0, -1.0, 0.2], [1.0, -1.0, 0.2], [0.3, 9.0, 0.1]).requires_grad_()
    advantages = t([2.0] * 3, [-2.0] * 3, [1.0] * 3)
    mask = t([1, 1, 1], [1, 1, 1], [1, 0, 1])
    loss = fn.geometric_mean_loss(logprobs, torch.zeros(3, 3), advantages, mask, 0.4, 0.4)
    # A > 0: (0.4 - 1 + 0.2) / 3 = -0.4/3;  A < 0: (1 - 0.4 + 0.2) / 3 = 0.8/3;  (0.3 + 0.1) / 2
    up, down, short = math.exp(-0.4 / 3), math.exp(0.8 / 3), math.exp(0.2)
    close(loss[0], [-2 * up] * 3)
    close(loss[1], [2 * down] * 3)
    close(loss[2, [0, 2]], [-short] * 2)
    fn.aggregate(loss, mask, "seq-mean-token-mean").backward()
    # Each sequence's -A rho / tokens, without the tokens whose clip binds; a third of the batch
    third = 1 / 9
    close(logprobs.grad[0], [0.0, -2 * up * third, -2 * up * third])
    close(logprobs.grad[1], [2 * down * third, 0.0, 2 * down * third])
    close(logprobs.grad[2], [-short / 6, 0.0, -short / 6])


def test_a_token_leaves_by_how_far_its_probability_has_moved_in_its_advantages_direction():
    # p / q is 100 for the first, whose probability has moved by 0.001, and 0.8 for the last
    p, q = t([0.00101, 0.6, 0.6, 0.2, 0.2, 0.79]), t([0.0000101, 0.4, 0.4, 0.4, 0.4, 0.99])
    advantages = t([1.0, 1.0, -1.0, 1.0, -1.0, -1.0])
    gone = fn.diverged(p.log(), q.log(), advantages, "tv", 0.15, 0.15)
    assert gone.tolist() == [[False, True, False, False, True, True]]
    logprobs = p.log().requires_grad_()
    loss = fn.divergence_loss(logprobs, q.log(), advantages, "tv", 0.15, 0.15, 20.0)
    # -min(p / q, 20) A log p of those that stay: 100 is cut to 20
    close(
        loss, [[-20 * math.log(0.00101), 0.0, 1.5 * math.log(0.6), -0.5 * math.log(0.2), 0.0, 0.0]]
    )
    loss.sum().backward()
    close(logprobs.grad, [[-20.0, 0.0, 1.5, -0.5, 0.0, 0.0]])


def test_the_binary_kl_is_between_the_token_and_all_others_together():
    # 0.4 log(0.4 / 0.6) + 0.6 log(0.6 / 0.4) = 0.2 log 1.5 = 0.0811
    p, q, up = t([0.6, 0.2]).log(), t([0.4, 0.4]).log(), t([1.0, -1.0])
    for limit, gone in ((0.0810, True), (0.0812, False)):
        assert fn.diverged(p, q, up, "kl", 9.0, limit)[0, 0].item() is gone
    # 0.4 log(0.4 / 0.2) + 0.6 log(0.6 / 0.8) = 0.277259 - 0.172609
    for limit, gone in ((0.1046, True), (0.1047, False)):
        assert fn.diverged(p, q, up, "kl", limit, 9.0)[0, 1].item() is gone
    # A token that was certain, and one that has become so: no NaN
    sure = t([0.0, 0.0]), t([-1.0, 0.0])
    assert fn.diverged(*sure, t([1.0, 1.0]), "kl", 0.1, 0.1).tolist() == [[True, False]]


# Against loops


def ref_sequence_ratio(logprobs, old, mask):
    means = [ref_mean((logprobs - old)[i : i + 1], mask[i : i + 1]) for i in range(len(mask))]
    return np.array([math.exp(clip(mean, -20, 20)) for mean in means])


def ref_surrogate(rho, advantage, low, high, dual):
    loss = -min(rho * advantage, clip(rho, 1 - low, 1 + high) * advantage)
    return min(loss, -dual * advantage) if dual is not None and advantage < 0 else loss


def ref_geometric_mean(logprobs, old, advantages, mask, low, high):
    found = np.zeros_like(logprobs)
    for i, row in enumerate(mask):
        logs = []
        for j, m in enumerate(row):
            d = clip(logprobs[i, j] - old[i, j], -20, 20)
            logs += [min(d, high) if advantages[i, j] > 0 else max(d, -low)] if m else []
        found[i] = -math.exp(sum(logs) / max(len(logs), 1)) * advantages[i]
    return found


def ref_divergence(new, old, advantage, kind, low, high, most):
    p, q = math.exp(new), math.exp(old)
    moved = abs(p - q)
    if kind == "kl":
        moved = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p)) if p > 0 else math.inf
    left = p > q and moved > high if advantage > 0 else p < q and moved > low
    return 0.0 if left else -min(math.exp(clip(new - old, -20, 20)), most) * advantage * new


def ref_aggregate(loss, mask, how, tokens, sequences, length):
    rows = [[x for x, m in zip(*row, strict=True) if m] for row in zip(loss, mask, strict=True)]
    rows = [row for row in rows if row]
    if how == "token-mean":
        return sum(map(sum, rows)) / max(tokens, 1)
    if how == "seq-mean-token-mean":
        return sum(sum(row) / len(row) for row in rows) / max(sequences, 1)
    return sum(map(sum, rows)) / max(sequences, 1) / (length if how.endswith("norm") else 1)


@pytest.mark.parametrize("scale", [0.5, 15.0])  # 15: many log ratios beyond the clamp
@pytest.mark.parametrize("seed", SEEDS)
def test_token_losses_are_those_of_the_reference(seed, scale):
    r = Random(seed)
    logprobs, old, advantages = r.token(scale), r.token(scale), r.token()

    def rho(a, b):
        return math.exp(clip(a - b, -20, 20))

    for dual in (None, 1.5):
        got = run(fn.policy_ratio_loss, logprobs, old, advantages, 0.2, 0.3, dual)
        want = per_token(
            lambda a, b, A, c=dual: ref_surrogate(rho(a, b), A, 0.2, 0.3, c),
            logprobs,
            old,
            advantages,
        )
        same(got, want)
        sequence = ref_sequence_ratio(logprobs, old, r.mask)
        got = run(fn.sequence_ratio_loss, logprobs, old, advantages, r.mask, 0.02, 0.03, dual)
        spread = np.broadcast_to(sequence[:, None], old.shape)
        same(
            got,
            per_token(lambda s, A, c=dual: ref_surrogate(s, A, 0.02, 0.03, c), spread, advantages),
        )
    same(run(fn.sequence_ratio, logprobs, old, r.mask), ref_sequence_ratio(logprobs, old, r.mask))
    want = per_token(lambda a, b, A: -clip(rho(a, b), 0.8, 1.3) * A * a, logprobs, old, advantages)
    same(run(fn.cispo_loss, logprobs, old, advantages, 0.2, 0.3), want)
    want = per_token(
        lambda a, b, A: (
            -A * 4 / (s := 1.0 if A > 0 else 1.05) / (1 + math.exp(-s * (rho(a, b) - 1)))
        ),
        logprobs, old, advantages,
    )  # fmt: skip
    same(run(fn.soft_gate_loss, logprobs, old, advantages, 1.0, 1.05), want)
    got = run(fn.geometric_mean_loss, logprobs, old, advantages, r.mask, 0.4, 0.3)
    same(got, ref_geometric_mean(logprobs, old, advantages, r.mask, 0.4, 0.3))
    below, before = -np.abs(logprobs) - 1e-3, -np.abs(old) - 1e-3
    for kind in ("tv", "kl"):
        got = run(fn.divergence_loss, below, before, advantages, kind, 0.1, 0.2, 20.0)
        want = per_token(
            lambda a, b, A, kind=kind: ref_divergence(a, b, A, kind, 0.1, 0.2, 20.0),
            below, before, advantages,
        )  # fmt: skip
        same(got, want)
    want = per_token(
        lambda v, o, R: 0.5 * max((v - R) ** 2, (clip(v, o - 0.2, o + 0.2) - R) ** 2),
        logprobs,
        old,
        advantages,
    )
    same(run(fn.value_loss, logprobs, old, advantages, 0.2), want)


@pytest.mark.parametrize("seed", SEEDS)
def test_pair_losses_are_those_of_the_reference(seed):
    r = Random(seed)
    a, b, c, d = (r.row() for _ in range(4))
    rows = range(r.rows)
    same(run(fn.bradley_terry_loss, a, b, 0.5), [-log_sigmoid(a[i] - b[i] - 0.5) for i in rows])
    want = [-log_sigmoid(0.1 * ((a[i] - c[i]) - (b[i] - d[i]))) for i in rows]
    same(run(fn.dpo_loss, a, b, c, d, 0.1), want)
    sign_w, sign_l = np.sign(c), np.sign(d)
    want = [
        -log_sigmoid(a[i] - b[i]) - log_sigmoid(sign_w[i] * a[i]) - log_sigmoid(sign_l[i] * b[i])
        for i in rows
    ]
    same(run(fn.cost_model_loss, a, b, sign_w, sign_l), want)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("seed", SEEDS)
def test_aggregates_are_those_of_the_reference_however_the_rows_are_split(seed, how):
    r = Random(seed)
    loss = r.token()
    tokens, sequences = int(r.mask.sum()), int(r.mask.any(1).sum())
    want = ref_aggregate(loss, r.mask, how, tokens, sequences, 16)
    same(run(fn.aggregate, loss, r.mask, how, length=16), want)
    order, cuts = r.rng.permutation(r.rows), np.sort(r.rng.integers(0, r.rows + 1, 2))
    counts = SimpleNamespace(tokens=tokens, sequences=sequences)
    parts = [
        run(fn.aggregate, loss[p], r.mask[p], how, counts, length=16) for p in np.split(order, cuts)
    ]
    same(sum(parts), want)


# Gradients by finite differences

TOKEN_LOSSES = {
    "policy_ratio_loss": lambda x, old, A, mask: fn.policy_ratio_loss(x, old, A, 0.2, 0.3),
    "policy_ratio_loss with dual clip": lambda x, old, A, mask: fn.policy_ratio_loss(
        x, old, A, 0.2, 0.3, 3.0
    ),
    "sequence_ratio": lambda x, old, A, mask: fn.sequence_ratio(x, old, mask),
    "soft_gate_loss": lambda x, old, A, mask: fn.soft_gate_loss(x, old, A, 1.0, 1.05),
    "value_loss": lambda x, old, A, mask: fn.value_loss(x, old, A, 0.2),
    "value_loss without clip": lambda x, old, A, mask: fn.value_loss(x, old, A, None),
    **{
        how: lambda x, old, A, mask, how=how: fn.aggregate(x * A, mask, how, length=7)
        for how in HOWS
    },
}


@pytest.mark.parametrize("name", TOKEN_LOSSES)
@pytest.mark.parametrize("seed", range(3))
def test_the_gradient_of_a_token_loss_is_that_of_finite_differences(name, seed):
    logprobs, old, advantages, mask = smooth_batch(seed)
    loss = TOKEN_LOSSES[name]
    assert torch.autograd.gradcheck(lambda x: loss(x, old, advantages, mask), (logprobs,))
    (gradient,) = torch.autograd.grad(loss(logprobs, old, advantages, mask).sum(), logprobs)
    assert gradient.abs().sum() > 0


def test_the_gradients_of_the_pair_losses_are_those_of_finite_differences():
    rng = np.random.default_rng(0)
    a, b, c, d = (torch.tensor(rng.normal(0, 2, 5), requires_grad=True) for _ in range(4))
    sign_w, sign_l = c.detach().sign(), d.detach().sign()
    assert torch.autograd.gradcheck(lambda *x: fn.bradley_terry_loss(*x, margin=0.3), (a, b))
    assert torch.autograd.gradcheck(lambda *x: fn.cost_model_loss(*x, sign_w, sign_l), (a, b))
    assert torch.autograd.gradcheck(lambda *x: fn.dpo_loss(*x, beta=0.5), (a, b, c, d))


@pytest.mark.parametrize("seed", range(3))
def test_cispos_gradient_is_that_of_the_log_likelihood_with_frozen_weights(seed):
    logprobs, old, advantages, _ = smooth_batch(seed)
    (got,) = torch.autograd.grad(fn.cispo_loss(logprobs, old, advantages, 0.2, 0.3).sum(), logprobs)
    weights = np.clip(np.exp((logprobs.detach() - old).numpy()), 0.8, 1.3)
    same(got, -weights * advantages.numpy())


@pytest.mark.parametrize("kind", ["tv", "kl"])
def test_the_divergence_losss_gradient_is_that_of_the_log_likelihood_with_frozen_weights(kind):
    logprobs, old, advantages, _ = smooth_batch(0)
    logprobs, old = (-(x.detach().abs()) - 0.01 for x in (logprobs, old))
    logprobs.requires_grad_()
    loss = fn.divergence_loss(logprobs, old, advantages, kind, 0.1, 0.1, 2.0)
    (got,) = torch.autograd.grad(loss.sum(), logprobs)
    weights = np.minimum(np.exp((logprobs.detach() - old).numpy()), 2.0)
    kept = ~fn.diverged(logprobs, old, advantages, kind, 0.1, 0.1).numpy()
    assert 0 < kept.mean() < 1
    same(got, -weights * kept * advantages.numpy())


@pytest.mark.parametrize("seed", range(5))
def test_the_geometric_mean_loss_has_value_and_gradient_of_the_loss_per_sequence(seed):
    # GMPO's objective as TRL writes it: -A exp(mean of min(d A, clip(d) A) / A)
    logprobs, old, advantages, mask = smooth_batch(seed)
    A = advantages[:, :1].expand_as(advantages)
    got = fn.aggregate(
        fn.geometric_mean_loss(logprobs, old, A, mask, 0.4, 0.3), mask, "seq-mean-token-mean"
    )
    d = logprobs - old
    inner = torch.where(
        A > 0, torch.minimum(d, d.clamp(-0.4, 0.3)), torch.maximum(d, d.clamp(-0.4, 0.3))
    )
    means = (inner * mask).sum(1) / mask.sum(1)
    want = (-A[:, 0] * means.exp()).mean()
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(
        torch.autograd.grad(got, logprobs)[0], torch.autograd.grad(want, logprobs)[0]
    )


@pytest.mark.parametrize("seed", range(5))
def test_the_sequence_ratio_loss_has_value_and_gradient_of_the_loss_per_sequence(seed):
    # GSPO's objective, written per sequence: -min(s A, clip(s) A), with s differentiated as a whole.
    logprobs, old, advantages, mask = smooth_batch(seed)
    advantages = advantages[:, :1].expand_as(advantages)
    per_token = fn.sequence_ratio_loss(logprobs, old, advantages, mask, 0.2, 0.3)
    got = fn.aggregate(per_token, mask, "seq-mean-token-mean")
    s, A = fn.sequence_ratio(logprobs, old, mask), advantages[:, 0]
    want = -torch.minimum(s * A, s.clamp(0.8, 1.3) * A).mean()
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(
        torch.autograd.grad(got, logprobs)[0], torch.autograd.grad(want, logprobs)[0]
    )
