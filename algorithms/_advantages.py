"""From scores, log ratios and values to rewards, advantages and weights: constants of a loss, without a graph."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridflow.algorithms._tensors import (
    as_bool,
    masked_mean,
    refuse,
    result_dtype,
    same_shape,
    wide,
)


@torch.no_grad()
def whiten(x: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8) with the mean and unbiased variance of all unmasked tokens (arXiv:1909.08593).

    `x`, `mask`, result: [B, T]; 0 on masked tokens. `shift_mean=False` adds the mean back: only the spread is
    normalised. A single token has variance 0."""
    m = as_bool(mask, x)
    mean = masked_mean(wide(x), m)
    centered = (wide(x) - mean).masked_fill(~m, 0)
    var = centered.square().sum() / (m.sum() - 1).clamp(min=1)
    white = centered * torch.rsqrt(var + 1e-8)
    if not shift_mean:
        white = (white + mean).masked_fill(~m, 0)
    return white.to(result_dtype(x))


def kl_estimate(
    logprobs: Tensor, ref_logprobs: Tensor, kind: str, *, in_loss: bool = False
) -> Tensor:
    """Estimate of KL(policy || reference) per token, from one sample (Schulman, http://joschu.net/blog/kl-approx.html).

    With d = logprobs - ref_logprobs: `k1` = d; `abs` = |d|; `k2` = d^2 / 2; `k3` = exp(-d) - 1 + d (d clamped).
    `logprobs`, `ref_logprobs`, result: [B, T]; differentiable. As a loss, k2 has the gradient of the reverse KL, k3's
    is biased and usual. Raises ValueError for another kind, and for k1 `in_loss`: its expected on-policy gradient is 0.
    """
    if in_loss and kind == "k1":
        raise ValueError(
            "kl_estimate: kind 'k1' cannot be a loss, its expected on-policy gradient is zero; use 'k2' or 'k3'"
        )
    same_shape("kl_estimate", logprobs=logprobs, ref_logprobs=ref_logprobs)
    d = wide(logprobs) - wide(ref_logprobs)
    if kind == "k1":
        estimate = d
    elif kind == "abs":
        estimate = d.abs()
    elif kind == "k2":
        estimate = d.square() / 2
    elif kind == "k3":
        d = d.clamp(
            -20, 20
        )  # in both terms: clamped in the exp alone, the gradient's sign would be wrong below -20
        estimate = torch.expm1(-d) + d
    else:
        refuse("kl_estimate", "kind", kind, "k1", "abs", "k2", "k3")
    return estimate.to(result_dtype(logprobs))


@torch.no_grad()
def token_rewards(score: Tensor, kl: Tensor, mask: Tensor, beta: float) -> Tensor:
    """-beta kl_t, plus the sequence's score at its last unmasked token (arXiv:1909.08593, eq. 2, per token), or each token's.

    `score`: [B], or [B, T] with a score for each token; `kl`, `mask`, result: [B, T], of kl's dtype; 0 on masked tokens. A row
    without tokens gets no score. Raises ValueError if score is neither."""
    m = as_bool(mask, kl)
    if score.shape not in (kl.shape[:1], kl.shape):
        raise ValueError(
            f"token_rewards: score must be [B] = [{kl.shape[0]}] or [B, T] = {list(kl.shape)}, got {tuple(score.shape)}"
        )
    rewards = (-beta * wide(kl)).masked_fill(~m, 0)
    if score.dim() == 2:
        return torch.where(m, rewards + score.to(rewards.dtype), rewards).to(result_dtype(kl))
    last = m & (m.flip(1).cumsum(1).flip(1) == 1)
    return torch.where(last, rewards + score.to(rewards.dtype)[:, None], rewards).to(
        result_dtype(kl)
    )


@torch.no_grad()
def discounted_returns(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """R_t = r_t + gamma R_t', t' the next unmasked token. `rewards`, `mask`, result: [B, T]; 0 on masked tokens, whose
    rewards are not read."""
    m, r = as_bool(mask, rewards), wide(rewards)
    returns = torch.zeros_like(r)
    following = r.new_zeros(r.shape[0])
    for t in reversed(range(r.shape[1])):
        following = torch.where(m[:, t], r[:, t] + gamma * following, following)
        returns[:, t] = following
    return returns.masked_fill(~m, 0).to(result_dtype(rewards))


@torch.no_grad()
def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv:1506.02438, eq. 16), across the holes of the mask.

    delta_t = r_t + gamma V_t' - V_t;  A_t = delta_t + gamma lam A_t';  returns = A + V;  t' is the next unmasked token.
    V after the last token is 0, also for an answer that was cut. `rewards`, `values`, `mask` and both results
    (advantages, returns): [B, T]; 0 on masked tokens, whose rewards and values are not read."""
    m, r, v = as_bool(mask, rewards), wide(rewards), wide(values)
    same_shape("gae", rewards=rewards, values=values)
    advantages = torch.zeros_like(r)
    next_value = next_advantage = r.new_zeros(r.shape[0])
    for t in reversed(range(r.shape[1])):
        delta = r[:, t] + gamma * next_value - v[:, t]
        next_advantage = torch.where(m[:, t], delta + gamma * lam * next_advantage, next_advantage)
        next_value = torch.where(m[:, t], v[:, t], next_value)
        advantages[:, t] = next_advantage
    advantages = advantages.masked_fill(~m, 0)
    returns = (advantages + v).masked_fill(~m, 0)
    return advantages.to(result_dtype(rewards)), returns.to(result_dtype(rewards))


@torch.no_grad()
def group_normalized(
    scores: Tensor, group: Tensor, scale: str = "std", eps: float = 1e-6
) -> Tensor:
    """GRPO's advantage (r - mean_g) / (std_g + eps), unbiased std (arXiv:2402.03300, section 4.1.2).

    `scale="none"` drops the division (Dr. GRPO, arXiv:2503.20783). `scores`, result: [B]; `group`: int64 [B], any ids
    in any order. Equal scores, and a group of one, give exactly 0. Raises ValueError for another scale."""
    if scale not in ("std", "none"):
        refuse("group_normalized", "scale", scale, "std", "none")
    x, inverse, size = _by_group(scores, group)
    centered = x - _group_sum(x, inverse) / size
    if scale == "std":
        std = (_group_sum(centered.square(), inverse) / (size - 1).clamp(min=1)).sqrt()
        centered = centered / (std + eps)
    return centered.to(result_dtype(scores))


@torch.no_grad()
def leave_one_out(scores: Tensor, group: Tensor) -> Tensor:
    """RLOO's advantage: r_i - mean of the other members of its group (arXiv:2402.14740); a group of one gives r_i.

    `scores`, result: [B]; `group`: int64 [B], any ids in any order. Equal scores in a group give exactly 0."""
    x, inverse, size = _by_group(scores, group)
    others = (_group_sum(x, inverse) - x) / (size - 1).clamp(min=1)
    return torch.where(size > 1, x - others, wide(scores)).to(result_dtype(scores))


def _by_group(scores: Tensor, group: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scores above the lowest of their group (so that equal scores are exactly 0), the group's index, its size: [B]."""
    if scores.dim() != 1 or scores.shape != group.shape:
        raise ValueError(
            f"scores and group must both be [B], got {tuple(scores.shape)} and {tuple(group.shape)}"
        )
    _, inverse, count = torch.unique(group, return_inverse=True, return_counts=True)
    x = wide(scores)
    lowest = x.new_zeros(len(count)).scatter_reduce(0, inverse, x, "amin", include_self=False)
    return x - lowest[inverse], inverse, count[inverse]


def _group_sum(x: Tensor, inverse: Tensor) -> Tensor:
    return torch.zeros_like(x).index_add(0, inverse, x)[inverse]


def overlong_punishment(length: Tensor, limit: int, cache: int) -> Tensor:
    """DAPO's soft punishment of length (arXiv:2503.14476, eq. 13), to be added to the score.

    0 if n <= limit - cache; ((limit - cache) - n) / cache up to limit; -1 beyond. `length`: [B], tokens; result: [B].
    Raises ValueError unless 0 < cache <= limit."""
    if not 0 < cache <= limit:
        raise ValueError(
            f"overlong_punishment: 0 < cache <= limit must hold, got cache={cache}, limit={limit}"
        )
    return ((limit - cache - wide(length)) / cache).clamp(-1, 0).to(result_dtype(length))


@torch.no_grad()
def importance_weights(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    mode: str,
    low: float,
    high: float,
    level: str = "token",
) -> Tensor:
    """Weights, without gradient, that correct a per-token loss for the rollout engine's policy not being the trainer's.

    w = exp(old - rollout) per token; at level `sequence`, exp of the sum over the sequence, on each of its tokens.
    mode `truncate`: min(w, high) (`low` is not used); mode `mask`: w inside [low, high], else 0. Multiply the loss and
    leave its mask alone: dropped tokens stay in the denominator. Tensors and result: [B, T]; 0 on masked tokens.
    Raises ValueError for another mode or level."""
    if mode not in ("truncate", "mask"):
        refuse("importance_weights", "mode", mode, "truncate", "mask")
    if level not in ("token", "sequence"):
        refuse("importance_weights", "level", level, "token", "sequence")
    m = as_bool(mask, old_logprobs)
    same_shape("importance_weights", old_logprobs=old_logprobs, rollout_logprobs=rollout_logprobs)
    log_ratio = (wide(old_logprobs) - wide(rollout_logprobs)).masked_fill(~m, 0)
    if level == "sequence":
        log_ratio = log_ratio.sum(1, keepdim=True).expand_as(log_ratio)
    weights = log_ratio.clamp(-20, 20).exp()
    if mode == "truncate":
        weights = weights.clamp(max=high)
    else:
        weights = weights.masked_fill((weights < low) | (weights > high), 0)
    return weights.masked_fill(~m, 0).to(result_dtype(old_logprobs))
