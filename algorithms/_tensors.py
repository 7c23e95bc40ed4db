"""What the pure functions share: masks, dtypes, log ratios, the refusal of unknown names."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor


def as_bool(mask: Tensor, like: Tensor) -> Tensor:
    """The mask as bool; ValueError if it would be broadcast."""
    if mask.shape != like.shape:
        raise ValueError(
            f"the mask must have the shape of its tensor: got {tuple(mask.shape)} for {tuple(like.shape)}"
        )
    return mask.bool()


def same_shape(function: str, **tensors: Tensor) -> None:
    """ValueError, with every shape, unless all are equal: [B] beside [B, T] could broadcast unnoticed."""
    if len({x.shape for x in tensors.values()}) > 1:
        got = ", ".join(f"{name} {list(x.shape)}" for name, x in tensors.items())
        raise ValueError(f"{function}: the tensors must have one shape, got {got}")


def result_dtype(x: Tensor) -> torch.dtype:
    """Its own dtype for a floating tensor, float32 for integers."""
    return x.dtype if x.is_floating_point() else torch.float32


def wide(x: Tensor) -> Tensor:
    """At least float32: sums in half precision stop growing at a few hundred tokens."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def masked_mean(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """sum(x mask) / sum(mask), over everything or along `dim`; 0 where there is no token. `x`, `mask`: the same shape.

    A statistic of the tensors at hand: a loss is reduced by `aggregate`, with the counts of the whole mini-batch."""
    m = as_bool(mask, x)
    total = wide(x).masked_fill(~m, 0).sum(dim)
    return total.div(m.sum(dim).clamp(min=1)).to(result_dtype(x))


def ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """exp(logprobs - old_logprobs), the log ratio clamped to [-20, 20]."""
    return (wide(logprobs) - wide(old_logprobs)).clamp(-20, 20).exp()


def refuse(function: str, name: str, got: object, *allowed: str) -> NoReturn:
    raise ValueError(
        f"{function}: {name} must be one of {', '.join(map(repr, allowed))}, got {got!r}"
    )
