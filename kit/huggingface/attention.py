"""Causal attention for trainers, of padded rows and of packed ones, which do not see each other.

Packed rows lie one after another, ascending by length. Rows with equal prompts may share one:

    ids [1, N]     a a a b b b c c c c c | p p p q q r r      q and r go on from p

On a CPU each run of equal lengths is one call of torch's kernel, as a batch [rows, heads, S, D]. On
a GPU in half precision one call has them all. transformers calls `attend` by its registered name;
under that name it makes no mask, and it hands `packed_rows` through every layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface

NAME = "hybridflow"
"""Of this attention in a config's `_attn_implementation`."""
HALF = (torch.bfloat16, torch.float16)
"""What the kernel for rows of any lengths takes."""
LARGEST_HEAD = 256
"""The largest size of a head that it takes."""


@attrs.frozen(eq=False)
class Tails:
    """Neighbouring tails of one length, whose prompts have one length too."""

    count: int
    """How many they are."""
    length: int
    """The tokens of each."""
    run: int
    """The number, among PackedRows.runs, of the run that their prompts are in."""
    prompts: torch.Tensor
    """The place of each tail's prompt in that run, int64 [count]."""
    mask: torch.Tensor
    """What is added to the scores of a token and a key of prompt and tail, 0 or -inf:
    [length, prompt + length]."""


class PackedRows:
    """The lengths of the rows and tails that lie one after another in a packed sequence.

    A row begins with its own first token; a prompt that several responses share is a row too. A
    tail is a response that goes on from such a prompt. All rows lie before all tails.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        device: torch.device,
        tails: Sequence[tuple[int, int]] = (),
    ):
        """lengths: tokens of each row, none of them 0. tails: of each (the number of the row that
        is its prompt, tokens). Equal ones should be neighbours.
        """
        self.lengths = list(lengths)
        self.device = device
        self.tails = list(tails)

    @cached_property
    def runs(self) -> list[tuple[int, int]]:
        """(rows, tokens of each) of the neighbours of equal length."""
        return [(len(list(run)), length) for length, run in groupby(self.lengths)]

    @cached_property
    def tail_runs(self) -> list[Tails]:
        """The neighbours among the tails that are alike."""
        # The run of each row, and its place there.
        places = [(run, at) for run, (count, _) in enumerate(self.runs) for at in range(count)]
        found = []
        for (run, length), alike in groupby(self.tails, lambda tail: (places[tail[0]][0], tail[1])):
            prompts = [places[row][1] for row, _ in alike]
            before = self.runs[run][1]
            mask = torch.full((length, before + length), -torch.inf, device=self.device)
            index = torch.tensor(prompts, device=self.device)
            found.append(Tails(len(prompts), length, run, index, mask.triu(before + 1)))
        return found

    @cached_property
    def bounds(self) -> torch.Tensor:
        """The place of the first token of each row and tail, and N: int32 on the device."""
        return self._bounds([*self.lengths, *(length for _, length in self.tails)])

    @cached_property
    def key_bounds(self) -> torch.Tensor:
        """`bounds` of the keys: a tail has its prompt's before its own."""
        tails = [self.lengths[row] + length for row, length in self.tails]
        return self._bounds([*self.lengths, *tails])

    @cached_property
    def keys(self) -> torch.Tensor:
        """The place of each key among the tokens, int64 on the device."""
        firsts = [0]
        for length in (*self.lengths, *(length for _, length in self.tails)):
            firsts.append(firsts[-1] + length)
        pieces = [torch.arange(sum(self.lengths))]
        for number, (row, length) in enumerate(self.tails, len(self.lengths)):
            pieces.append(torch.arange(firsts[row], firsts[row + 1]))
            pieces.append(torch.arange(firsts[number], firsts[number] + length))
        return torch.cat(pieces).to(self.device, non_blocking=True)

    @property
    def longest(self) -> int:
        """The most tokens of a row or tail."""
        return max([*self.lengths, *(length for _, length in self.tails)])

    @property
    def most_keys(self) -> int:
        """The most tokens of a row, or of a tail with its prompt."""
        return max([*self.lengths, *(self.lengths[row] + length for row, length in self.tails)])

    def _bounds(self, lengths: list[int]) -> torch.Tensor:
        ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
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
    if packed_rows is None:
        attended = _causal(query, key, value, scaling)
        return attended.transpose(1, 2).contiguous(), None

    # [N, heads, D], as the projections have written them.
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return attend_packed(query, key, value, packed_rows, scaling)[None], None


def attend_packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rows: PackedRows,
    scaling: float | None = None,
) -> torch.Tensor:
    """Return [N, heads, D] of query, key and value [N, heads, D], each row causal in itself."""
    if takes_any_lengths(query, value):
        return _any_lengths(query, key, value, rows, scaling)
    return _run_by_run(query, key, value, rows, scaling)


def takes_any_lengths(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether one kernel takes rows of different lengths: on a GPU, in half precision."""
    return (
        query.is_cuda
        and query.dtype in HALF
        and query.shape[-1] == value.shape[-1]
        and query.shape[-1] <= LARGEST_HEAD
    )


def _causal(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return [B, heads, S, D]; without a mask every row begins at its first position."""
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _any_lengths(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rows: PackedRows,
    scaling: float | None,
) -> torch.Tensor:
    """Return what `attend_packed` does, by FlashAttention."""
    from torch.nn.attention.varlen import varlen_attn

    # The last query of a sequence sees its last key, so a tail sees its whole prompt.
    if rows.tails:
        key = key.index_select(0, rows.keys)
        value = value.index_select(0, rows.keys)
    attended = varlen_attn(
        query,
        key,
        value,
        rows.bounds,
        rows.key_bounds,
        rows.longest,
        rows.most_keys,
        scale=scaling,
        window_size=(-1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(attended, torch.Tensor)
    return attended


def _run_by_run(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rows: PackedRows,
    scaling: float | None,
) -> torch.Tensor:
    """Return what `attend_packed` does, by one call for each run of equal lengths."""
    if query.device.type == "cpu" and query.shape[-1] == value.shape[-1]:
        return _Runs.apply(query, key, value, rows, scaling)
    batches = _batches(query, key, value, rows)
    return _flat([_causal(q, k, v, scaling, mask) for q, k, v, mask in batches])


def _batches(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rows: PackedRows
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]]:
    """Yield query, key and value [rows, heads, S, D] of each run, and a mask for tails.

    A tail's keys and values are those of its prompt and then its own.
    """
    runs = list(zip(*(_runs(tensor, rows) for tensor in (query, key, value)), strict=True))
    for q, k, v in runs[: len(rows.runs)]:
        yield q, k, v, None
    for tails, (q, k, v) in zip(rows.tail_runs, runs[len(rows.runs) :], strict=True):
        _, prompt_keys, prompt_values = runs[tails.run]
        k = torch.cat([prompt_keys.index_select(0, tails.prompts), k], 2)
        v = torch.cat([prompt_values.index_select(0, tails.prompts), v], 2)
        yield q, k, v, tails.mask.to(query.dtype)


def _runs(tensor: torch.Tensor, rows: PackedRows) -> list[torch.Tensor]:
    """Return [rows, heads, S, D] for each run of [N, heads, D]."""
    # One split costs less than a slice for each run, in the backward pass above all.
    shapes = [*rows.runs, *((tails.count, tails.length) for tails in rows.tail_runs)]
    parts = tensor.split([count * length for count, length in shapes])
    return [
        part.unflatten(0, shape).transpose(1, 2) for part, shape in zip(parts, shapes, strict=True)
    ]


def _flat(runs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return [N, heads, D] of [rows, heads, S, D] for each run."""
    flat = [run.transpose(1, 2).flatten(0, 1) for run in runs]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


class _Runs(torch.autograd.Function):
    """All runs as one node of the graph, on a CPU: the kernel of scaled_dot_product_attention.

    A node for every step of every run takes as long as the arithmetic of short rows, and would keep
    each run's result, and the keys that were gathered for tails, for the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rows: PackedRows,
        scaling: float | None,
    ) -> torch.Tensor:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        attended, sums = [], []
        for q, k, v, mask in _batches(query, key, value, rows):
            out, logsumexp = kernel(q, k, v, 0.0, mask is None, attn_mask=mask, scale=scaling)
            attended.append(out)
            sums.append(logsumexp)
        result = _flat(attended)
        ctx.rows = rows
        ctx.scaling = scaling
        ctx.save_for_backward(query, key, value, result, *sums)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        query, key, value, result, *sums = ctx.saved_tensors
        rows = ctx.rows
        batches = _batches(query, key, value, rows)
        grads: list[tuple[torch.Tensor, ...]] = []
        for (q, k, v, mask), given, out, logsumexp in zip(
            batches, _runs(grad, rows), _runs(result, rows), sums, strict=True
        ):
            causal = mask is None
            found = kernel(
                given, q, k, v, out, logsumexp, 0.0, causal, attn_mask=mask, scale=ctx.scaling
            )
            grads.append(found)

        # A prompt's keys and values have the gradients of all its tails besides.
        first = len(rows.runs)
        for number, tails in enumerate(rows.tail_runs, first):
            own = []
            for whole, prompts in zip(grads[number][1:], grads[tails.run][1:], strict=True):
                before = whole.shape[2] - tails.length
                prompts.index_add_(0, tails.prompts, whole[:, :, :before])
                own.append(whole[:, :, before:])
            grads[number] = (grads[number][0], *own)
        return *(_flat(runs) for runs in zip(*grads, strict=True)), None, None


AttentionInterface.register(NAME, attend)
