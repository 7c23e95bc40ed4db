"""Drawing tokens from (seed, position), without the state of a generator: what engines share that use our random numbers.

A sequence's tokens so depend on its seed, its prompt and the weights alone, not on the batch, the ranks, or on where it
was cut and gone on with.
"""

from __future__ import annotations

import numpy as np
import torch

_GOLDEN, _MIX1, _MIX2 = (
    int(np.uint64(c).astype(np.int64))
    for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014), on int64 with wrap-around. Works in place."""
    for shift, factor in ((30, _MIX1), (27, _MIX2)):
        x ^= (x >> shift) & (
            (1 << (64 - shift)) - 1
        )  # >> on int64 copies the sign; the mask makes it logical
        x *= factor
    x ^= (x >> 31) & ((1 << 33) - 1)
    return x


def uniforms(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """float32 in [0, 1) with 24 random bits, one for each (seed, position).

    `seeds`, `positions`: int64, shapes that broadcast. Any numbering of positions does that gives a token the same one
    however its sequence was cut.
    """
    state = _mix(seeds + _GOLDEN) + positions * _GOLDEN
    return ((_mix(state) >> 40) & 0xFFFFFF).float() * 2.0**-24


def draw(
    logprobs: torch.Tensor,
    uniform: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """Tokens int64 [R] from `logprobs` float32 [R, V] and `uniform` [R].

    Of each row's distribution stay the tokens with at least `min_p` [R] times the largest probability (0: all), of these
    the `top_k` [R] most likely (0: all, 1: the argmax), of these the smallest set that has `top_p` [R] of what is left.
    """
    probs = logprobs.exp()
    filtered = (top_k > 0) | (top_p < 1) | (min_p > 0)
    chosen = None
    if bool(filtered.any()):
        chosen = _filtered(*(rows[filtered] for rows in (probs, uniform, top_k, top_p, min_p)))
    tokens = invert(probs.cumsum_(-1), uniform[:, None])[:, 0]
    if chosen is not None:
        tokens[filtered] = chosen  # the others draw what they draw alone
    return tokens


def _filtered(
    probs: torch.Tensor,
    uniform: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """`draw` of rows that all have a filter: the most likely tokens come first, not those of the lowest number."""
    probs, order = probs.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(probs.shape[-1], device=probs.device)
    probs = probs.masked_fill(probs < min_p[:, None] * probs[:, :1], 0.0)
    probs = probs.masked_fill((rank >= top_k[:, None]) & (top_k > 0)[:, None], 0.0)
    below = probs.cumsum(-1)
    kept = (below - probs < top_p[:, None] * below[:, -1:]) & (probs > 0)
    return order.gather(1, invert(probs.masked_fill(~kept, 0.0).cumsum(-1), uniform[:, None]))[:, 0]


def invert(
    cumulated: torch.Tensor, uniform: torch.Tensor, total: torch.Tensor | None = None
) -> torch.Tensor:
    """The first column whose cumulated weight exceeds uniform * total: [R, V], [R, 1] -> int64 [R, 1]."""
    total = cumulated[:, -1:] if total is None else total
    return torch.searchsorted(cumulated, uniform * total, right=True).clamp_(
        max=cumulated.shape[-1] - 1
    )
