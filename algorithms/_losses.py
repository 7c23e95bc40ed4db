"""Losses per token and per pair, and their reduction to one number.

For shapes and masks see `functional`. sg is the stop-gradient operator.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridflow.algorithms._tensors import (
    as_bool,
    masked_mean,
    ratio,
    refuse,
    result_dtype,
    same_shape,
    wide,
)


def policy_ratio_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Tensor:
    """Return PPO's clipped surrogate per token (arXiv:1707.06347, eq. 7).

        rho = exp(logprobs - old_logprobs)
        L   = -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)

    The two limits may differ (arXiv:2503.14476). With `dual_clip` c > 1 it is min(L, -c A) where
    A < 0 (arXiv:1912.09729). All tensors and the result: [B, T]. Raises ValueError if
    dual_clip <= 1.
    """
    same_shape(
        "policy_ratio_loss", logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages
    )

    # In float32 at least, whatever the dtype of the logprobs.
    rho = ratio(logprobs, old_logprobs)
    return _surrogate(rho, advantages, clip_low, clip_high, dual_clip).to(result_dtype(logprobs))


def sequence_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Return GSPO's ratio, exp of the sequence's mean log ratio (arXiv:2507.18071).

    Inputs: [B, T]; result: [B], 1 for a row without tokens. For the loss see
    `sequence_ratio_loss`.
    """
    same_shape("sequence_ratio", logprobs=logprobs, old_logprobs=old_logprobs)

    # The mean over tokens in the exponent is the geometric mean of their ratios.
    mean = masked_mean(wide(logprobs) - wide(old_logprobs), mask, dim=1)
    return mean.clamp(-20, 20).exp().to(result_dtype(logprobs))


def sequence_ratio_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Tensor:
    """Return GSPO's loss per token (the GSPO-token form of arXiv:2507.18071).

    It is the surrogate of `policy_ratio_loss` with the ratio sg(rho_seq) pi / sg(pi): each token
    has the value of its sequence's ratio, and the gradient of its own logprob. Reduced by
    `seq-mean-token-mean`, value and gradient are those of
    -min(rho_seq A, clip(rho_seq, 1 - clip_low, 1 + clip_high) A) averaged over sequences.
    All tensors and the result: [B, T]. Raises ValueError if dual_clip <= 1.
    """
    same_shape("sequence_ratio_loss", logprobs=logprobs, advantages=advantages)
    # own - sg(own) is 0, so that exp of it is 1, with the gradient of own.
    own = wide(logprobs)
    sequence = sequence_ratio(own.detach(), wide(old_logprobs).detach(), mask)
    rho = sequence[:, None] * (own - own.detach()).exp()
    return _surrogate(rho, advantages, clip_low, clip_high, dual_clip).to(result_dtype(logprobs))


def _surrogate(
    rho: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> Tensor:
    """Return the loss L of `policy_ratio_loss`, with its dual clip, for any ratio [B, T]."""
    # -min(rho A, clipped A) is the maximum of the two negated.
    clipped = rho.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(-rho * advantages, -clipped * advantages)
    if dual_clip is None:
        return loss

    # For negative advantages a large ratio makes the loss grow without bound: bound it.
    if not dual_clip > 1:
        raise ValueError(f"dual_clip must be above 1, got {dual_clip}")
    return torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)


def cispo_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> Tensor:
    """Return -sg(clip(rho, 1 - clip_low, 1 + clip_high)) A logprob per token (arXiv:2506.13585).

    No token loses its gradient. All tensors and the result: [B, T]. `clip_low` of 1 or more leaves
    the lower side open.
    """
    same_shape("cispo_loss", logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)

    # The weight is a constant: the gradient goes through logprob alone.
    weight = ratio(logprobs, old_logprobs).clamp(1 - clip_low, 1 + clip_high).detach()
    return (-weight * advantages * wide(logprobs)).to(result_dtype(logprobs))


def soft_gate_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, tau_pos: float, tau_neg: float
) -> Tensor:
    """Return SAPO's loss per token (arXiv:2511.20347).

        rho = exp(logprobs - old_logprobs)
        L   = -(4 / tau) sigmoid(tau (rho - 1)) A,    tau = tau_pos where A > 0, else tau_neg

    Its slope in rho is -A at rho = 1, and falls smoothly on both sides, the faster the larger tau
    is. All tensors and the result: [B, T]. Raises ValueError unless both tau are above 0.
    """
    same_shape(
        "soft_gate_loss", logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages
    )
    if not (tau_pos > 0 and tau_neg > 0):
        raise ValueError(f"soft_gate_loss: tau must be above 0, got {tau_pos} and {tau_neg}")

    rho = ratio(logprobs, old_logprobs)
    tau = torch.where(advantages > 0, tau_pos, tau_neg)
    gate = 4 / tau * (tau * (rho - 1)).sigmoid()
    return (-gate * advantages).to(result_dtype(logprobs))


def geometric_mean_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
) -> Tensor:
    """Return GMPO's loss per token (arXiv:2507.20673).

        d = logprobs - old_logprobs, clipped to [-clip_low, clip_high] where that is the pessimistic
            side: above for A > 0, below for A < 0
        L = -exp(mean of d over the sequence) A

    Each token has the value of its sequence, and the gradient of its own logprob, so that reduced
    by `seq-mean-token-mean` both are those of the loss per sequence. The limits are of log ratios.
    All tensors and the result: [B, T].
    """
    same_shape(
        "geometric_mean_loss", logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages
    )
    d = (wide(logprobs) - wide(old_logprobs)).clamp(-20, 20)
    clipped = torch.where(advantages > 0, d.clamp(max=clip_high), d.clamp(min=-clip_low))
    sequence = masked_mean(clipped.detach(), mask, dim=1).exp()
    # The difference is 0, so that exp of it is 1, with the gradient of the token's own.
    rho = sequence[:, None] * (clipped - clipped.detach()).exp()
    return (-rho * advantages).to(result_dtype(logprobs))


def divergence_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    kind: str,
    limit_low: float,
    limit_high: float,
    most_ratio: float,
) -> Tensor:
    """Return DPPO's loss per token, by the binary divergence (arXiv:2602.04879).

        p = exp(logprobs), q = exp(old_logprobs), the sampled token's probabilities
        L = -M sg(min(p / q, most_ratio)) A logprob

    M is 0 for a token whose probability has moved in its advantage's direction by more than the
    limit: limit_high where A > 0, limit_low else. How far it has moved is by `kind`

        tv    |p - q|
        kl    q log(q / p) + (1 - q) log((1 - q) / (1 - p))

    All tensors and the result: [B, T]. Raises ValueError for another kind.
    """
    if kind not in ("tv", "kl"):
        refuse("divergence_loss", "kind", kind, "tv", "kl")
    same_shape(
        "divergence_loss", logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages
    )
    new, old = wide(logprobs), wide(old_logprobs)
    weight = ratio(new.detach(), old).clamp(max=most_ratio)
    kept = ~diverged(new.detach(), old, advantages, kind, limit_low, limit_high)
    return (-weight * kept * advantages * new).to(result_dtype(logprobs))


@torch.no_grad()
def diverged(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    kind: str,
    limit_low: float,
    limit_high: float,
) -> Tensor:
    """Return where `divergence_loss` has M = 0, bool [B, T]."""
    new, old = wide(logprobs), wide(old_logprobs)
    p, q = new.exp(), old.exp()
    if kind == "tv":
        moved = (p - q).abs()
    else:
        # expm1 keeps the digits of 1 - p where p is close to 1; tiny keeps the logarithm finite.
        tiny = torch.finfo(p.dtype).tiny
        rest_p, rest_q = (-torch.expm1(x.clamp(max=0)) for x in (new, old))
        moved = q * (old - new) + rest_q * (rest_q.clamp(min=tiny) / rest_p.clamp(min=tiny)).log()
    up = (advantages > 0) & (p > q) & (moved > limit_high)
    return up | ((advantages <= 0) & (p < q) & (moved > limit_low))


def value_loss(
    values: Tensor, old_values: Tensor | None, returns: Tensor, clip: float | None
) -> Tensor:
    """Return PPO's clipped value loss per token (arXiv:2005.12729).

        0.5 max((v - R)^2, (clip(v, old - clip, old + clip) - R)^2)

    `clip=None` gives 0.5 (v - R)^2, and old_values is not read. All tensors and the result: [B, T].
    Raises ValueError if there is a clip and no old_values.
    """
    same_shape("value_loss", values=values, returns=returns)
    v = wide(values)
    target = wide(returns)
    error = (v - target).square()

    # A value that has moved far from the old one gains nothing by moving further.
    if clip is not None:
        if old_values is None:
            raise ValueError(
                f"value_loss: clip={clip} needs old_values, got None; pass them, or clip=None"
            )
        same_shape("value_loss", values=values, old_values=old_values)
        old = wide(old_values)
        clipped = v.clamp(old - clip, old + clip)
        error = torch.maximum(error, (clipped - target).square())
    return (0.5 * error).to(result_dtype(values))


def bradley_terry_loss(chosen: Tensor, rejected: Tensor, margin: float | Tensor = 0) -> Tensor:
    """Return -log sigmoid(chosen - rejected - margin) per pair (arXiv:2203.02155, eq. 1).

    The margin is that of arXiv:2307.09288, eq. 2. `chosen`, `rejected`: [P], scores; `margin`: a
    number or [P]; result: [P].
    """
    same_shape("bradley_terry_loss", chosen=chosen, rejected=rejected)

    # A number counts for all pairs.
    if isinstance(margin, Tensor) and margin.dim():
        same_shape("bradley_terry_loss", chosen=chosen, margin=margin)
    return -F.logsigmoid(chosen - rejected - margin)


def cost_model_loss(cost_w: Tensor, cost_l: Tensor, sign_w: Tensor, sign_l: Tensor) -> Tensor:
    """Return the loss of Safe RLHF's cost model per pair (arXiv:2310.12773).

        -log s(C_w - C_l) - log s(sign_w C_w) - log s(sign_l C_l)

    s is the sigmoid, and w is the more harmful response of the pair. `cost_w`, `cost_l`: [P];
    `sign_w`, `sign_l`: [P], +1 if that response is harmful, else -1; result: [P].
    """
    same_shape("cost_model_loss", cost_w=cost_w, cost_l=cost_l, sign_w=sign_w, sign_l=sign_l)
    return (
        -F.logsigmoid(cost_w - cost_l)
        - F.logsigmoid(sign_w * cost_w)
        - F.logsigmoid(sign_l * cost_l)
    )


def dpo_loss(
    policy_w: Tensor, policy_l: Tensor, ref_w: Tensor, ref_l: Tensor, beta: float
) -> Tensor:
    """Return the loss of DPO per pair (arXiv:2305.18290, eq. 7).

        -log sigmoid(beta ((policy_w - ref_w) - (policy_l - ref_l)))

    w is the preferred response of the pair. All tensors and the result: [P]; each input is the sum
    of the logprobs of a response.
    """
    same_shape("dpo_loss", policy_w=policy_w, policy_l=policy_l, ref_w=ref_w, ref_l=ref_l)
    return -F.logsigmoid(beta * ((policy_w - ref_w) - (policy_l - ref_l)))


def aggregate(
    loss: Tensor,
    mask: Tensor,
    how: str,
    counts: Any = None,
    *,
    length: float | None = None,
) -> Tensor:
    """Reduce the per-token loss x to one number.

    Summed over micro-batches and ranks, it is the loss of the complete mini-batch, which has N
    tokens in S sequences (rows with at least one token):

        token-mean                 sum of x / N
        seq-mean-token-mean        sum over sequences of (mean of its x) / S
        seq-mean-token-sum         sum of x / S
        seq-mean-token-sum-norm    sum of x / S / length

    `length` is a constant such as the longest response allowed (Dr. GRPO, arXiv:2503.20783).
    `loss`, `mask`: [B, T], or [B] for a loss per row or pair, which counts as one token. `counts`:
    an object with `tokens` (N) and `sequences` (S) of the mini-batch over all ranks; without it,
    this mask is the mini-batch. Result: a scalar; without tokens 0, with a graph. Rows are never
    split. Raises ValueError for another `how`, shapes that differ, and a missing `length`.
    """
    tokens = as_bool(mask, loss)
    x = wide(loss).masked_fill(~tokens, 0)

    # A loss per row or pair is one of a single token.
    if loss.dim() == 1:
        tokens = tokens[:, None]
        x = x[:, None]

    # Both counts are at least 1, so that a mini-batch without tokens gives 0.
    row_tokens = tokens.sum(1)
    token_count = _count(row_tokens.sum() if counts is None else counts.tokens)
    sequences = _count((row_tokens > 0).sum() if counts is None else counts.sequences)

    if how == "token-mean":
        total = x.sum() / token_count
    elif how == "seq-mean-token-mean":
        row_means = x.sum(1) / row_tokens.clamp(min=1)
        total = row_means.sum() / sequences
    elif how == "seq-mean-token-sum":
        total = x.sum() / sequences
    elif how == "seq-mean-token-sum-norm":
        if length is None or not length > 0:
            raise ValueError(
                "aggregate: 'seq-mean-token-sum-norm' needs a constant length above 0, "
                f"got {length}"
            )
        total = x.sum() / sequences / length
    else:
        allowed = (
            "token-mean",
            "seq-mean-token-mean",
            "seq-mean-token-sum",
            "seq-mean-token-sum-norm",
        )
        refuse("aggregate", "how", how, *allowed)
    return total.to(result_dtype(loss))


def _count(n: int | Tensor) -> Tensor:
    """Return the count `n` as a denominator, which is at least 1."""
    return torch.as_tensor(n).clamp(min=1)
