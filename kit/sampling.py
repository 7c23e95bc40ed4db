"""Draws tokens from (seed, position), without the state of a generator.

Engines that use our random numbers share it. A sequence's tokens then depend on its seed, its
prompt and the weights alone: not on the batch, the ranks, or on where it was interrupted and
continued.
"""

from __future__ import annotations

import numpy as np
import torch

# Constants of splitmix64 (Steele, Lea, Flood 2014), as int64 with the same bits.
_GOLDEN, _MIX1, _MIX2 = (
    int(np.uint64(constant).astype(np.int64))
    for constant in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def _mix(bits: torch.Tensor) -> torch.Tensor:
    """Apply splitmix64's finaliser to int64 in place, with wrap-around.

    Each round is bits ^= bits >> shift; bits *= factor. A shift of int64 copies the sign, and the
    mask makes it logical.
    """
    for shift, factor in ((30, _MIX1), (27, _MIX2)):
        mask = (1 << (64 - shift)) - 1
        bits ^= (bits >> shift) & mask
        bits *= factor
    bits ^= (bits >> 31) & ((1 << 33) - 1)
    return bits


def uniforms(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return float32 in [0, 1) with 24 random bits, one for each (seed, position).

    `seeds` and `positions` are int64, of shapes that broadcast. A token's position must be the same
    whether or not its sequence was interrupted.
    """
    state = _mix(seeds + _GOLDEN) + positions * _GOLDEN
    bits = (_mix(state) >> 40) & 0xFFFFFF
    return bits.float() * 2.0**-24


def draw(
    logprobs: torch.Tensor,
    uniform: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """Return one token per row, int64 [R], from `logprobs` float32 [R, V] and `uniform` [R].

    Filters apply to each row one after the other. `min_p` [R] keeps tokens with at least that share
    of the largest probability (0: all). Of these `top_k` [R] keeps the most likely (0: all, 1: the
    argmax). Of these `top_p` [R] keeps the smallest set with that share of their probability.
    """
    probs = logprobs.exp()
    filtered = (top_k > 0) | (top_p < 1) | (min_p > 0)

    # Rows with a filter are sorted, so they are drawn separately, which changes no other row. They
    # come first, because the cumulative sum below overwrites `probs`.
    filtered_tokens = None
    if bool(filtered.any()):
        filtered_tokens = _filtered(
            probs[filtered], uniform[filtered], top_k[filtered], top_p[filtered], min_p[filtered]
        )

    tokens = invert(cumulate(probs), uniform[:, None])[:, 0]
    if filtered_tokens is not None:
        tokens[filtered] = filtered_tokens
    return tokens


def _filtered(
    probs: torch.Tensor,
    uniform: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """Return the result of `draw` for rows that all have a filter.

    Here the most likely tokens come first in the cumulative distribution, not the lowest ids.
    """
    probs, order = probs.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(probs.shape[-1], device=probs.device)

    # min_p, then top_k
    probs = probs.masked_fill(probs < min_p[:, None] * probs[:, :1], 0.0)
    beyond_k = (rank >= top_k[:, None]) & (top_k > 0)[:, None]
    probs = probs.masked_fill(beyond_k, 0.0)

    # top_p: a token stays if the more likely ones have less than that share of the total.
    parts = addable(probs)
    cumulated = parts.cumsum(-1)
    inside_p = cumulated - parts < share(top_p[:, None], cumulated[:, -1:])
    remaining = inside_p & (probs > 0)
    probs = probs.masked_fill(~remaining, 0.0)

    places = invert(cumulate(probs), uniform[:, None])
    return order.gather(1, places)[:, 0]


FRACTION_BITS = 40
"""Fraction bits of a probability as a fixed-point integer."""


def adds_in_order(device: torch.device) -> bool:
    """Return whether a cumulative sum on the device adds sequentially, as on a CPU.

    A GPU adds in blocks, whose sums of floats are neither monotone nor, over 150,000 tokens, equal
    from run to run.
    """
    return device.type == "cpu"


def addable(weights: torch.Tensor) -> torch.Tensor:
    """Return weights whose sums do not depend on their order: fixed-point integers on a GPU."""
    if adds_in_order(weights.device):
        return weights
    return (weights.double() * 2.0**FRACTION_BITS).round_().to(torch.int64)


def cumulate(weights: torch.Tensor) -> torch.Tensor:
    """Return the running totals of weights [R, V]; it may overwrite them."""
    # In place, where no copy was made.
    parts = addable(weights)
    return parts.cumsum_(-1)


def share(fraction: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Return fraction * total, in the dtype of `total`."""
    # An integer is rounded down, as the sums are.
    if total.is_floating_point():
        return fraction * total
    return (fraction.double() * total).floor_().to(torch.int64)


def invert(
    cumulated: torch.Tensor, uniform: torch.Tensor, total: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the first column whose cumulated weight exceeds uniform * total, int64 [R, 1].

    `cumulated` is [R, V] (see `cumulate`); `uniform` and `total` are [R, 1]. The total is the last
    column if not given.
    """
    total = cumulated[:, -1:] if total is None else total
    columns = torch.searchsorted(cumulated, share(uniform, total), right=True)
    return columns.clamp_(max=cumulated.shape[-1] - 1)
