"""Helpers of the pure functions: masks, dtypes, log ratios, errors for unknown names."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor


def as_bool(mask: Tensor, like: Tensor) -> Tensor:
    """Return the mask as bool. Raises ValueError if its shape is not that of `like`."""
    if mask.shape != like.shape:
        raise ValueError(
            "the mask must have the shape of its tensor: "
            f"got {tuple(mask.shape)} for {tuple(like.shape)}"
        )
    return mask.bool()


def same_shape(function: str, **tensors: Tensor) -> None:
    """Raise ValueError unless all tensors have one shape: [B] would broadcast with [B, T]."""
    if len({tensor.shape for tensor in tensors.values()}) > 1:
        got = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
        raise ValueError(f"{function}: the tensors must have one shape, got {got}")


def result_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of a floating tensor, float32 for integers."""
    return x.dtype if x.is_floating_point() else torch.float32


def wide(x: Tensor) -> Tensor:
    """Return `x` as float32 at least: half-precision sums stop growing at a few hundred tokens."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def masked_mean(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Return sum(x mask) / sum(mask), over everything or along `dim`; 0 where there is no token.

    `x` and `mask` have one shape. It is a statistic of the tensors at hand: a loss is reduced by
    `aggregate`, with the counts of the complete mini-batch.
    """
    # Filled instead of multiplied: 0 times NaN or infinity would be NaN.
    tokens = as_bool(mask, x)
    total = wide(x).masked_fill(~tokens, 0).sum(dim)
    count = tokens.sum(dim).clamp(min=1)
    return total.div(count).to(result_dtype(x))


def ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Return exp(logprobs - old_logprobs), with the log ratio clamped to [-20, 20]."""
    return (wide(logprobs) - wide(old_logprobs)).clamp(-20, 20).exp()


def refuse(function: str, name: str, got: object, *allowed: str) -> NoReturn:
    """Raise ValueError for a value `got` of the parameter `name` that is not one of `allowed`."""
    raise ValueError(
        f"{function}: {name} must be one of {', '.join(map(repr, allowed))}, got {got!r}"
    )
