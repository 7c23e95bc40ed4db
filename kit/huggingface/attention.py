"""Causal attention for trainers, of padded rows and of packed ones, which do not see each other.

Packed rows lie one after another, sorted by length:

    ids [1, N]     a a a b b b c c c c c d        lengths 3 3 5 1, runs (2, 3) (1, 5) (1, 1)

On a CPU each run of equal lengths is one call of torch's kernel, as a batch [rows, heads, S, D]. On
a GPU in half precision one call has them all. transformers calls `attend` by its registered name;
under that name it makes no mask, and it hands `packed_rows` through every layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

NAME = "hybridflow"
"""Of this attention in a config's `_attn_implementation`."""
HALF = (torch.bfloat16, torch.float16)
"""What the kernel for rows of any lengths takes."""
LARGEST_HEAD = 256
"""The largest size of a head that it takes."""


class PackedRows:
    """The lengths of the rows that lie one after another in a packed sequence."""

    def __init__(self, lengths: Sequence[int], device: torch.device):
        """lengths: tokens of each row that has any; their sum is N."""
        self.lengths = list(lengths)
        self.device = device
        self.longest = max(self.lengths)

    @cached_property
    def runs(self) -> list[tuple[int, int]]:
        """(rows, tokens of each) of the neighbours of equal length."""
        return [(len(list(run)), length) for length, run in groupby(self.lengths)]

    @cached_property
    def bounds(self) -> torch.Tensor:
        """The place of each row's first token, and N: int32 [rows + 1] on the device."""
        ends = torch.tensor([0, *self.lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return ends.to(self.device, non_blocking=True)


@torch.compiler.disable
def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    packed_rows: PackedRows | None = None,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """Return (attended [B, S, heads, D], None), for query [B, heads, S, D].

    Key and value may have fewer heads. With `packed_rows`, B is 1 and S the sum of their lengths.
    """
    rows = packed_rows
    if rows is None:
        grouped = query.shape[1] != key.shape[1]
        attended = _causal(query, key, value, scaling, grouped)
        return attended.transpose(1, 2).contiguous(), None

    # [N, heads, D], as the projections have written them.
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return attend_packed(query, key, value, rows, scaling)[None], None


def attend_packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rows: PackedRows,
    scaling: float | None = None,
) -> torch.Tensor:
    """Return [N, heads, D] of query, key and value [N, heads, D], each row causal in itself."""
    by_lengths = _any_lengths if takes_any_lengths(query, value) else _run_by_run
    return by_lengths((query, key, value), rows, scaling, query.shape[1] != key.shape[1])


def takes_any_lengths(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether one kernel takes rows of different lengths: on a GPU, in half precision."""
    return (
        query.is_cuda
        and query.dtype in HALF
        and query.shape[-1] == value.shape[-1]
        and query.shape[-1] <= LARGEST_HEAD
    )


def _causal(query, key, value, scaling: float | None, grouped: bool) -> torch.Tensor:
    """Return [B, heads, S, D]; every row begins at its first position."""
    return F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped
    )


def _any_lengths(
    flat: Sequence[torch.Tensor], rows: PackedRows, scaling: float | None, grouped: bool
) -> torch.Tensor:
    """Return what `attend_packed` does, by FlashAttention."""
    from torch.nn.attention.varlen import varlen_attn

    query, key, value = flat
    bounds = rows.bounds
    attended = varlen_attn(
        query,
        key,
        value,
        bounds,
        bounds,
        rows.longest,
        rows.longest,
        scale=scaling,
        window_size=(-1, 0),
        enable_gqa=grouped,
    )
    assert isinstance(attended, torch.Tensor)
    return attended


def _run_by_run(
    flat: Sequence[torch.Tensor], rows: PackedRows, scaling: float | None, grouped: bool
) -> torch.Tensor:
    """Return what `attend_packed` does, by one call for each run of equal lengths."""
    # One split costs less than a slice for each run, in the backward pass above all.
    sizes = [count * length for count, length in rows.runs]
    parts = [tensor.split(sizes) for tensor in flat]
    attended = []
    for (count, length), *run in zip(rows.runs, *parts, strict=True):
        query, key, value = (part.unflatten(0, (count, length)).transpose(1, 2) for part in run)
        batch = _causal(query, key, value, scaling, grouped)
        attended.append(batch.transpose(1, 2).flatten(0, 1))
    return attended[0] if len(attended) == 1 else torch.cat(attended)


AttentionInterface.register(NAME, attend)
