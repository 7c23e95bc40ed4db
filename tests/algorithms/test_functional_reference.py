"""The pure functions against a reference in float64 numpy, looping straight from the formulas, and against finite
differences. Inputs are random, ragged and with holes."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hybridflow.algorithms import functional as fn

SEEDS = range(25)
HOWS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")


class Random:
    """Random tensors of one ragged batch: rows of any length, 0 included, with holes."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.rows, self.tokens = self.rng.integers(1, 8), self.rng.integers(1, 12)
        lengths = self.rng.integers(0, self.tokens + 1, self.rows)
        self.mask = (np.arange(self.tokens) < lengths[:, None]) & (self.rng.random((self.rows, self.tokens)) < 0.75)
        self.group = self.rng.integers(0, 3, self.rows) * 1000 - 7

    def token(self, scale=1.0):
        return self.rng.normal(0, scale, (self.rows, self.tokens))

    def row(self):
        return self.rng.normal(0, 2, self.rows)


def same(got, want):
    np.testing.assert_allclose(got.detach().numpy(), want, rtol=1e-6, atol=1e-6)


def run(function, *arrays_and_numbers, **kwargs):
    """`function` in float64 on numpy arrays."""
    return function(*(torch.tensor(x) if isinstance(x, np.ndarray) else x for x in arrays_and_numbers), **kwargs)


def clip(x, low, high):
    return min(max(x, low), high)


def log_sigmoid(x):
    return -math.log(1 + math.exp(-x))


def per_token(function, *arrays):
    return np.array([[function(*xs) for xs in zip(*rows, strict=True)] for rows in zip(*arrays, strict=True)])


def ref_mean(x, mask):
    kept = [x[i, j] for i, j in np.ndindex(*x.shape) if mask[i, j]]
    return sum(kept) / len(kept) if kept else 0.0


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


def ref_sequence_ratio(logprobs, old, mask):
    means = [ref_mean((logprobs - old)[i : i + 1], mask[i : i + 1]) for i in range(len(mask))]
    return np.array([math.exp(clip(mean, -20, 20)) for mean in means])


def ref_weights(old, rollout, mask, mode, low, high, level):
    out = np.zeros_like(old)
    for i, j in np.ndindex(*old.shape):
        if mask[i, j]:
            log_ratio = old[i, j] - rollout[i, j]
            if level == "sequence":
                log_ratio = sum(old[i, k] - rollout[i, k] for k in range(old.shape[1]) if mask[i, k])
            w = math.exp(clip(log_ratio, -20, 20))
            out[i, j] = min(w, high) if mode == "truncate" else (w if low <= w <= high else 0.0)
    return out


def ref_surrogate(rho, advantage, low, high, dual):
    loss = -min(rho * advantage, clip(rho, 1 - low, 1 + high) * advantage)
    return min(loss, -dual * advantage) if dual is not None and advantage < 0 else loss


def ref_aggregate(loss, mask, how, tokens, sequences, length):
    rows = [[x for x, m in zip(*row, strict=True) if m] for row in zip(loss, mask, strict=True)]
    rows = [row for row in rows if row]
    if how == "token-mean":
        return sum(map(sum, rows)) / max(tokens, 1)
    if how == "seq-mean-token-mean":
        return sum(sum(row) / len(row) for row in rows) / max(sequences, 1)
    return sum(map(sum, rows)) / max(sequences, 1) / (length if how.endswith("norm") else 1)


@pytest.mark.parametrize("seed", SEEDS)
def test_masked_statistics_are_those_of_the_reference(seed):
    r = Random(seed)
    x = r.token(3) + 5
    same(run(fn.masked_mean, x, r.mask), ref_mean(x, r.mask))
    same(run(fn.masked_mean, x, r.mask, dim=1), [ref_mean(a[None], m[None]) for a, m in zip(x, r.mask, strict=True)])
    for shift in (True, False):
        same(run(fn.whiten, x, r.mask, shift), ref_whiten(x, r.mask, shift))


@pytest.mark.parametrize("seed", SEEDS)
def test_rewards_and_returns_are_those_of_the_reference(seed):
    r = Random(seed)
    score, kl, rewards, values = r.row(), r.token(), r.token(), r.token()
    same(run(fn.token_rewards, score, kl, r.mask, 0.3), ref_token_rewards(score, kl, r.mask, 0.3))
    same(run(fn.token_rewards, 2 * kl, kl, r.mask, 0.3), ref_token_rewards(2 * kl, kl, r.mask, 0.3))
    for gamma, lam in ((1.0, 1.0), (0.9, 0.8), (0.5, 0.0), (0.0, 1.0)):
        same(run(fn.discounted_returns, rewards, r.mask, gamma), ref_returns(rewards, r.mask, gamma))
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
def test_token_losses_are_those_of_the_reference(seed, scale):
    r = Random(seed)
    logprobs, old, advantages = r.token(scale), r.token(scale), r.token()

    def rho(a, b):
        return math.exp(clip(a - b, -20, 20))

    for kind, formula in KINDS.items():
        want = per_token(lambda a, b, f=formula: f(a - b), logprobs, old)
        same(run(fn.kl_estimate, logprobs, old, kind), want)
    for dual in (None, 1.5):
        got = run(fn.policy_ratio_loss, logprobs, old, advantages, 0.2, 0.3, dual)
        want = per_token(lambda a, b, A, c=dual: ref_surrogate(rho(a, b), A, 0.2, 0.3, c), logprobs, old, advantages)
        same(got, want)
        sequence = ref_sequence_ratio(logprobs, old, r.mask)
        got = run(fn.sequence_ratio_loss, logprobs, old, advantages, r.mask, 0.02, 0.03, dual)
        spread = np.broadcast_to(sequence[:, None], old.shape)
        same(got, per_token(lambda s, A, c=dual: ref_surrogate(s, A, 0.02, 0.03, c), spread, advantages))
    same(run(fn.sequence_ratio, logprobs, old, r.mask), ref_sequence_ratio(logprobs, old, r.mask))
    want = per_token(lambda a, b, A: -clip(rho(a, b), 0.8, 1.3) * A * a, logprobs, old, advantages)
    same(run(fn.cispo_loss, logprobs, old, advantages, 0.2, 0.3), want)
    want = per_token(
        lambda v, o, R: 0.5 * max((v - R) ** 2, (clip(v, o - 0.2, o + 0.2) - R) ** 2), logprobs, old, advantages
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
    want = [-log_sigmoid(a[i] - b[i]) - log_sigmoid(sign_w[i] * a[i]) - log_sigmoid(sign_l[i] * b[i]) for i in rows]
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
    parts = [run(fn.aggregate, loss[p], r.mask[p], how, counts, length=16) for p in np.split(order, cuts)]
    same(sum(parts), want)


# ------------------------------------------------------------------------------------- gradients by finite differences


def smooth_batch(seed=0, rows=3, tokens=4):
    """Log ratios whose surrogates are away from the kinks at 0.8, 1.3 and the dual clip by more than the step."""
    rng = np.random.default_rng(seed)
    ratios = rng.choice([0.5, 0.7, 0.9, 1.1, 1.2, 1.6, 3.5], (rows, tokens))
    old = torch.tensor(rng.normal(-2, 1, (rows, tokens)))
    logprobs = (old + torch.tensor(ratios).log()).requires_grad_()
    advantages = torch.tensor(rng.choice([-2.0, -0.5, 0.7, 1.5], (rows, tokens)))
    mask = torch.tensor([[1, 1, 0, 1], [1, 0, 0, 0], [1, 1, 1, 1]])
    return logprobs, old, advantages, mask


TOKEN_LOSSES = {
    "policy_ratio_loss": lambda x, old, A, mask: fn.policy_ratio_loss(x, old, A, 0.2, 0.3),
    "policy_ratio_loss with dual clip": lambda x, old, A, mask: fn.policy_ratio_loss(x, old, A, 0.2, 0.3, 3.0),
    "sequence_ratio": lambda x, old, A, mask: fn.sequence_ratio(x, old, mask),
    "value_loss": lambda x, old, A, mask: fn.value_loss(x, old, A, 0.2),
    "value_loss without clip": lambda x, old, A, mask: fn.value_loss(x, old, A, None),
    "abs": lambda x, old, A, mask: fn.kl_estimate(x, old, "abs", in_loss=True),
    "k2": lambda x, old, A, mask: fn.kl_estimate(x, old, "k2", in_loss=True),
    "k3": lambda x, old, A, mask: fn.kl_estimate(x, old, "k3", in_loss=True),
    "masked_mean": lambda x, old, A, mask: fn.masked_mean(x * A, mask),
    **{how: lambda x, old, A, mask, how=how: fn.aggregate(x * A, mask, how, length=7) for how in HOWS},
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
    torch.testing.assert_close(torch.autograd.grad(got, logprobs)[0], torch.autograd.grad(want, logprobs)[0])


def test_k2s_expected_gradient_is_that_of_the_reverse_kl_and_k1s_is_zero():
    # Three tokens, expectation over the policy taken exactly, samples not differentiated.
    logits = torch.tensor([0.3, -0.8, 0.5], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64).log()
    logprobs = logits.log_softmax(0)
    p = logprobs.detach().exp()
    (want,) = torch.autograd.grad((logprobs.exp() * (logprobs - ref)).sum(), logits, retain_graph=True)
    (k2,) = torch.autograd.grad((p * fn.kl_estimate(logprobs, ref, "k2")).sum(), logits, retain_graph=True)
    (k1,) = torch.autograd.grad((p * fn.kl_estimate(logprobs, ref, "k1")).sum(), logits)
    torch.testing.assert_close(k2, want)
    assert want.abs().max() > 0.1
    assert k1.abs().max() < 1e-12


def test_k1_and_k3_have_the_kl_as_their_expectation():
    p, q = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64), torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)
    kl = sum(a * math.log(a / b) for a, b in zip(p.tolist(), q.tolist(), strict=True))
    for kind in ("k1", "k3"):
        assert (p * fn.kl_estimate(p.log(), q.log(), kind)).sum().item() == pytest.approx(kl, rel=1e-12)
