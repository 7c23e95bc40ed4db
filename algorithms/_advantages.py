"""Rewards, advantages and weights from scores, log ratios and values.

They are constants of a loss, without a graph. For shapes and masks see `functional`.
"""

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
    """Return (x - mean) / sqrt(var + 1e-8), over all unmasked tokens (arXiv:1909.08593).

    var is the unbiased variance, and 0 for a single token. `shift_mean=False` adds the mean back,
    so that only the spread is normalised. `x`, `mask`, result: [B, T]; 0 on masked tokens.
    """
    # The unbiased variance has one degree of freedom less than there are tokens.
    tokens = as_bool(mask, x)
    mean = masked_mean(wide(x), tokens)
    centered = (wide(x) - mean).masked_fill(~tokens, 0)
    squares = centered.square().sum()
    var = squares / (tokens.sum() - 1).clamp(min=1)

    # Masked tokens are 0 in the result, also when the mean is added back.
    white = centered * torch.rsqrt(var + 1e-8)
    if not shift_mean:
        white = (white + mean).masked_fill(~tokens, 0)
    return white.to(result_dtype(x))


def kl_estimate(
    logprobs: Tensor, ref_logprobs: Tensor, kind: str, *, in_loss: bool = False
) -> Tensor:
    """Estimate KL(policy || reference) per token from one sample.

    With d = logprobs - ref_logprobs the estimators are (Schulman,
    http://joschu.net/blog/kl-approx.html):

        k1    d
        abs   |d|
        k2    d^2 / 2
        k3    exp(-d) - 1 + d, with d clamped to [-20, 20]

    As a loss, k2 has the gradient of the reverse KL; that of k3 is biased, and usual.
    `logprobs`, `ref_logprobs`, result: [B, T]; differentiable. Raises ValueError for another kind,
    and for k1 `in_loss`, whose expected on-policy gradient is 0.
    """
    if in_loss and kind == "k1":
        raise ValueError(
            "kl_estimate: kind 'k1' cannot be a loss, its expected on-policy gradient is zero; "
            "use 'k2' or 'k3'"
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
        # Clamped in both terms: in exp alone, the gradient's sign would be wrong below -20.
        d = d.clamp(-20, 20)
        estimate = torch.expm1(-d) + d
    else:
        refuse("kl_estimate", "kind", kind, "k1", "abs", "k2", "k3")
    return estimate.to(result_dtype(logprobs))


@torch.no_grad()
def token_rewards(score: Tensor, kl: Tensor, mask: Tensor, beta: float) -> Tensor:
    """Return r_t = -beta kl_t + score_t (arXiv:1909.08593, eq. 2, per token).

    `score`: [B, T]; or [B], which counts at the last unmasked token of each row (a row without
    tokens gets none). `kl`, `mask`, result: [B, T], of the dtype of `kl`; 0 on masked tokens.
    Raises ValueError for another shape of `score`.
    """
    tokens = as_bool(mask, kl)
    if score.shape not in (kl.shape[:1], kl.shape):
        raise ValueError(
            f"token_rewards: score must be [B] = [{kl.shape[0]}] or [B, T] = {list(kl.shape)}, "
            f"got {tuple(score.shape)}"
        )
    rewards = (-beta * wide(kl)).masked_fill(~tokens, 0)

    if score.dim() == 2:
        scored = tokens
        token_scores = score.to(rewards.dtype)
    else:
        # The last token is the one at which the count of tokens from the right is 1.
        scored = tokens & (tokens.flip(1).cumsum(1).flip(1) == 1)
        token_scores = score.to(rewards.dtype)[:, None]
    return torch.where(scored, rewards + token_scores, rewards).to(result_dtype(kl))


@torch.no_grad()
def discounted_returns(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """Return R_t = r_t + gamma R_t', where t' is the next unmasked token.

    `rewards`, `mask`, result: [B, T]; 0 on masked tokens, whose rewards are not read.
    """
    # From the last token to the first; a masked token passes on the value that follows it.
    tokens = as_bool(mask, rewards)
    r = wide(rewards)
    returns = torch.zeros_like(r)
    following = r.new_zeros(r.shape[0])  # R_t', [B]
    for t in reversed(range(r.shape[1])):
        following = torch.where(tokens[:, t], r[:, t] + gamma * following, following)
        returns[:, t] = following
    return returns.masked_fill(~tokens, 0).to(result_dtype(rewards))


@torch.no_grad()
def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Return (advantages, returns) by generalised advantage estimation (arXiv:1506.02438, eq. 16).

        delta_t = r_t + gamma V_t' - V_t
        A_t     = delta_t + gamma lam A_t'
        R_t     = A_t + V_t

    t' is the next unmasked token, so that holes of the mask are skipped. V after the last token is
    0, also for a response that was cut off. `rewards`, `values`, `mask` and both results: [B, T];
    0 on masked tokens, whose rewards and values are not read.
    """
    tokens = as_bool(mask, rewards)
    same_shape("gae", rewards=rewards, values=values)
    r = wide(rewards)
    v = wide(values)

    advantages = torch.zeros_like(r)
    next_value = next_advantage = r.new_zeros(r.shape[0])  # V_t' and A_t', [B]
    for t in reversed(range(r.shape[1])):
        unmasked = tokens[:, t]
        delta = r[:, t] + gamma * next_value - v[:, t]
        next_advantage = torch.where(unmasked, delta + gamma * lam * next_advantage, next_advantage)
        next_value = torch.where(unmasked, v[:, t], next_value)
        advantages[:, t] = next_advantage

    # Masked tokens got what follows them above, which is not theirs.
    advantages = advantages.masked_fill(~tokens, 0)
    returns = (advantages + v).masked_fill(~tokens, 0)
    return advantages.to(result_dtype(rewards)), returns.to(result_dtype(rewards))


@torch.no_grad()
def group_normalized(
    scores: Tensor, group: Tensor, scale: str = "std", eps: float = 1e-6
) -> Tensor:
    """Return GRPO's advantage (r - mean_g) / (std_g + eps) (arXiv:2402.03300, section 4.1.2).

    mean_g and the unbiased std_g are those of the group of responses. `scale="none"` drops the
    division (Dr. GRPO, arXiv:2503.20783). `scores`, result: [B]; `group`: int64 [B], any ids in any
    order. A NaN, the score of a failed response, counts for no other one, and gives 0. Equal
    scores, and a single one, give exactly 0. Raises ValueError for another scale.
    """
    if scale not in ("std", "none"):
        refuse("group_normalized", "scale", scale, "std", "none")

    relative, inverse, kept = _by_group(scores, group)
    size = _group_sum(kept.to(relative.dtype), inverse).clamp(min=1)
    centered = (relative - _group_sum(relative, inverse) / size).masked_fill(~kept, 0)
    if scale == "std":
        var = _group_sum(centered.square(), inverse) / (size - 1).clamp(min=1)
        centered = centered / (var.sqrt() + eps)
    return centered.to(result_dtype(scores))


@torch.no_grad()
def leave_one_out(scores: Tensor, group: Tensor) -> Tensor:
    """Return RLOO's advantage: r_i less the mean of the others of its group (arXiv:2402.14740).

    A group of one gives r_i; equal scores in a larger group give exactly 0. A NaN, the score of a
    failed response, counts for no other one, and gives 0; so does a score whose others are all NaN,
    as it has no baseline. `scores`, result: [B]; `group`: int64 [B], any ids in any order.
    """
    relative, inverse, kept = _by_group(scores, group)
    size = _group_sum(kept.to(relative.dtype), inverse)
    rest = _group_sum(relative, inverse) - relative
    others = rest / (size - 1).clamp(min=1)

    # A group of one has no others, and no baseline.
    rows = _group_sum(torch.ones_like(relative), inverse)
    advantages = torch.where(rows > 1, relative - others, wide(scores)).masked_fill(~kept, 0)
    return advantages.to(result_dtype(scores))


@torch.no_grad()
def length_weighted(scores: Tensor, group: Tensor, lengths: Tensor) -> Tensor:
    """Return OPO's advantage: r_i less the mean of its group weighed by length (arXiv:2505.23585).

        A_i = r_i - sum_j l_j r_j / sum_j l_j

    That baseline has the least variance where a response's squared gradient grows as its length
    does. A NaN, the score of a failed response, counts for no other one, and gives 0, and equal
    scores give exactly 0. `scores`, `lengths` (tokens), result: [B]; `group`: int64 [B], any ids in
    any order.
    """
    relative, inverse, kept = _by_group(scores, group)
    same_shape("length_weighted", scores=scores, lengths=lengths)
    weights = wide(lengths).to(relative.dtype).masked_fill(~kept, 0)
    total = _group_sum(weights, inverse).clamp(min=1)
    baseline = _group_sum(weights * relative, inverse) / total
    return (relative - baseline).masked_fill(~kept, 0).to(result_dtype(scores))


def _by_group(scores: Tensor, group: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return per row: the score less its group's lowest, the group's index, whether it is no NaN.

    Each is [B]. Relative to the lowest, equal scores are exactly 0 without rounding errors; a NaN
    is 0 too.
    """
    if scores.dim() != 1 or scores.shape != group.shape:
        raise ValueError(
            f"scores and group must both be [B], got {tuple(scores.shape)} and {tuple(group.shape)}"
        )

    # `inverse` numbers the groups from 0, so that it can index the lowest scores.
    groups, inverse = torch.unique(group, return_inverse=True)
    x = wide(scores)
    kept = ~x.isnan()
    lowest = x.new_zeros(len(groups)).scatter_reduce(
        0, inverse, x.masked_fill(~kept, torch.inf), "amin", include_self=False
    )
    return (x - lowest[inverse]).masked_fill(~kept, 0), inverse, kept


def _group_sum(x: Tensor, inverse: Tensor) -> Tensor:
    """Return for each row the sum of `x` over its group, [B]."""
    return torch.zeros_like(x).index_add(0, inverse, x)[inverse]


@torch.no_grad()
def without_failed(mask: Tensor, *scores: Tensor) -> Tensor:
    """Return the mask [B, T] with zeros for the rows of which a score [B] is NaN.

    For advantages that compare several scores: each one's own failures are masked already.
    """
    failed = torch.stack([score.isnan() for score in scores]).any(0)
    return mask.masked_fill(failed[:, None], 0)


def overlong_punishment(length: Tensor, limit: int, cache: int) -> Tensor:
    """Return DAPO's soft punishment of a response of n tokens (arXiv:2503.14476, eq. 13).

        0                                  n <= limit - cache
        ((limit - cache) - n) / cache      limit - cache < n <= limit
        -1                                 limit < n

    It is to be added to the score. `length`: [B], tokens; result: [B]. Raises ValueError unless
    0 < cache <= limit.
    """
    if not 0 < cache <= limit:
        raise ValueError(
            f"overlong_punishment: 0 < cache <= limit must hold, got cache={cache}, limit={limit}"
        )

    # The middle line of the formula; clamping gives the other two.
    punishment = (limit - cache - wide(length)) / cache
    return punishment.clamp(-1, 0).to(result_dtype(length))


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
    """Return weights that correct a per-token loss for a rollout policy that is not the trainer's.

    Level `token`: w = exp(old - rollout); level `sequence`: exp of the sum of old - rollout over
    the sequence, on each of its tokens. Mode `truncate` gives min(w, high); mode `mask` gives w
    inside [low, high], else 0. Multiply the loss with them and leave its mask alone: dropped tokens
    stay in the denominator. Tensors and result: [B, T]; 0 on masked tokens; no gradient.
    Raises ValueError for another mode or level.
    """
    if mode not in ("truncate", "mask"):
        refuse("importance_weights", "mode", mode, "truncate", "mask")
    if level not in ("token", "sequence"):
        refuse("importance_weights", "level", level, "token", "sequence")
    tokens = as_bool(mask, old_logprobs)
    same_shape("importance_weights", old_logprobs=old_logprobs, rollout_logprobs=rollout_logprobs)

    # A sequence's ratio is the product of its tokens' ratios.
    log_ratio = (wide(old_logprobs) - wide(rollout_logprobs)).masked_fill(~tokens, 0)
    if level == "sequence":
        log_ratio = log_ratio.sum(1, keepdim=True).expand_as(log_ratio)
    weights = log_ratio.clamp(-20, 20).exp()

    # Weights that are too large are cut to the limit, or their tokens are dropped.
    if mode == "truncate":
        weights = weights.clamp(max=high)
    else:
        weights = weights.masked_fill((weights < low) | (weights > high), 0)
    return weights.masked_fill(~tokens, 0).to(result_dtype(old_logprobs))


@torch.no_grad()
def interpolated_logprobs(logprobs: Tensor, rollout_logprobs: Tensor, lag: Tensor) -> Tensor:
    """Estimate the logprobs of the weights at a step's start, between those before and after it.

    A token that lags by j steps was generated j + 1 steps before the end of the one that trains on
    it, and the start is j of them after that (A-3PO, arXiv:2512.06547; AReaL's "loglinear"):

        rollout + j / (j + 1) (logprobs - rollout)

    Without a lag it is the rollout's own. `logprobs`, of the present weights, `rollout_logprobs`
    and result: [B, T]; `lag`: [B, T], or [B] for all tokens of a sequence.
    """
    lags = lag if lag.dim() > 1 else lag[:, None].expand_as(logprobs)
    same_shape(
        "interpolated_logprobs", logprobs=logprobs, rollout_logprobs=rollout_logprobs, lag=lags
    )
    steps = wide(lags)
    rollout = wide(rollout_logprobs)
    moved = steps / (steps + 1) * (wide(logprobs) - rollout)
    return (rollout + moved).to(result_dtype(logprobs))
