"""Causal attention for trainers, of padded rows, and of packed rows separately from each other.

Packed rows lie one after another, ascending by length. Rows with equal prompts may share one:

    ids [1, N]     a a a b b b c c c c c | p p p q q r r      q and r go on from p

On a GPU in half precision one kernel call computes all rows. Elsewhere a call takes rows of similar
lengths, as a batch [rows, heads, S, D] that is padded a little. transformers calls `attend` by its
registered name; under that name it makes no mask, and it passes `packed_rows` through every layer.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import attrs
import numpy as np
import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface

NAME = "hybridflow"
"""Name of this attention in a config's `_attn_implementation`."""
HALF = (torch.bfloat16, torch.float16)
"""The dtypes that the kernel for rows of any lengths takes."""
LARGEST_HEAD = 256
"""The largest size of a head that it takes."""

MOST_PADDING = 1 << 19
"""The most multiplications that a block spends on padding: they take about as long as another block
costs, some 60 microseconds."""
MOST_MASKED = 1 << 22
"""The most elements of the mask of a block whose prompts differ in length."""


@attrs.frozen(eq=False)
class RowBlock:
    """Rows, or tails (see PackedRows), of one kernel call, padded at the right to the longest."""

    count: int
    """Number of rows or tails."""
    queries: int
    """Tokens of the longest."""
    keys: int
    """Tokens of the longest with its prompt."""
    mask: torch.Tensor | None
    """The mask to add to the scores, 0 or -inf, float32 [count or 1, 1, queries, keys]; None:
    queries attend to the keys up to their own position."""


@attrs.frozen(eq=False)
class Blocks:
    """All tokens of a packed sequence in blocks.

    No token attends to padding, which comes after it, and the outputs of padding are dropped.
    """

    blocks: list[RowBlock]
    at: torch.Tensor | None
    """The index of each token among the queries of all blocks, int64 [N]; None: the same order."""
    queries: torch.Tensor | None
    """The token of each query of all blocks, 0 for padding; None: the same order."""
    padding: torch.Tensor
    """The indices of the queries of all blocks that are padding, int64."""
    keys: torch.Tensor | None
    """The token of each key of all blocks, 0 for padding; None: the same order."""

    def queries_of(self, tensor: torch.Tensor, clear: bool = False) -> list[torch.Tensor]:
        """Split [N, heads, D] into blocks, each [count, heads, queries, D].

        Padding has the values of the first token, or 0 with `clear`.
        """
        if self.queries is not None:
            tensor = tensor.index_select(0, self.queries)
            if clear:
                tensor.index_fill_(0, self.padding, 0)
        return _apart(tensor, [(block.count, block.queries) for block in self.blocks])

    def keys_of(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Split keys or values [N, heads, D] into blocks, each [count, heads, keys, D]."""
        if self.keys is not None:
            tensor = tensor.index_select(0, self.keys)
        return _apart(tensor, [(block.count, block.keys) for block in self.blocks])

    def tokens_of(self, batches: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the values of queries in the order of the tokens: the inverse of `queries_of`."""
        flat = _flat(batches)
        return flat if self.at is None else flat.index_select(0, self.at)

    def key_sums_of(self, batches: Sequence[torch.Tensor], tokens: int) -> torch.Tensor:
        """Return for each token the sum of the values of its keys: [N, heads, D]."""
        flat = _flat(batches)
        if self.keys is None:
            return flat
        return flat.new_zeros(tokens, *flat.shape[1:]).index_add_(0, self.keys, flat)


def _apart(tensor: torch.Tensor, sizes: list[tuple[int, int]]) -> list[torch.Tensor]:
    """Split [all, heads, D] into a [count, heads, length, D] for each (count, length)."""
    # One split costs less than a slice for each block, in the backward pass above all.
    parts = tensor.split([count * length for count, length in sizes])
    return [
        part.unflatten(0, size).transpose(1, 2) for part, size in zip(parts, sizes, strict=True)
    ]


def _flat(batches: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate [count, heads, length, D] of each block to [all, heads, D]."""
    flat = [batch.transpose(1, 2).flatten(0, 1) for batch in batches]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


class PackedRows:
    """The lengths of the rows and tails that follow one another in a packed sequence.

    A row begins with its own first token; a prompt that several responses share is a row too. A
    tail is a response that continues such a prompt. All rows come before all tails.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        device: torch.device,
        tails: Sequence[tuple[int, int]] = (),
    ):
        """lengths: tokens of each row, none of them 0. tails: of each (the number of the row that
        is its prompt, tokens).
        """
        self.lengths = list(lengths)
        self.device = device
        self.tails = list(tails)
        self._blocks: dict[int, Blocks] = {}

    def blocks(self, width: int) -> Blocks:
        """Return the blocks for queries of `width` = heads x D numbers; cached."""
        if width not in self._blocks:
            self._blocks[width] = self._make_blocks(MOST_PADDING // width)
        return self._blocks[width]

    def _make_blocks(self, most_padding: int) -> Blocks:
        """Make blocks, in each at most `most_padding` pairs of query and key that are padding."""
        lengths = np.array([*self.lengths, *(length for _, length in self.tails)])
        firsts = lengths.cumsum() - lengths
        prompts = [row for row, _ in self.tails]
        begins = len(self.lengths)
        # For each row and tail: its number of tokens, its prompt's, and the index of each's first.
        pieces = np.zeros((len(lengths), 4), np.int64)
        pieces[:, 0] = lengths
        pieces[:, 2] = firsts
        pieces[begins:, 1] = lengths[prompts]
        pieces[begins:, 3] = firsts[prompts]

        blocks: list[RowBlock] = []
        queries = []
        keys = []
        rows, tails = (part.tolist() for part in np.split(pieces, [begins]))
        for alike in (*_alike(rows, most_padding), *_alike(tails, most_padding)):
            own, before, first, prompt_first = np.array(alike).T[:, :, None]
            place = np.arange(own.max() + before.max())
            in_prompt = np.where(place < before, prompt_first + place, -1)
            in_row = np.where(place < before + own, first + place - before, -1)
            keys.append(np.where(place < before, in_prompt, in_row))
            place = place[: own.max()]
            queries.append(np.where(place < own, first + place, -1))
            mask = _mask(before[:, 0], len(place)).to(self.device) if before.any() else None
            blocks.append(RowBlock(len(alike), len(place), keys[-1].shape[1], mask))

        query_tokens = np.concatenate([tokens.ravel() for tokens in queries])
        key_tokens = np.concatenate([tokens.ravel() for tokens in keys])
        padded = query_tokens < 0
        at = query_tokens[~padded].argsort()
        at = np.flatnonzero(~padded)[at]
        stays = bool(np.array_equal(at, np.arange(len(query_tokens))))
        put = self._put
        return Blocks(
            blocks,
            at=None if stays else put(at),
            queries=None if stays else put(query_tokens.clip(0)),
            padding=put(np.flatnonzero(padded)),
            keys=None if stays and not tails else put(key_tokens.clip(0)),
        )

    def _put(self, places: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(places).to(self.device, non_blocking=True)

    @cached_property
    def bounds(self) -> torch.Tensor:
        """The index of the first token of each row and tail, and N: int32 on the device."""
        return self._bounds([*self.lengths, *(length for _, length in self.tails)])

    @cached_property
    def key_bounds(self) -> torch.Tensor:
        """The same for keys, where a tail has its prompt's keys before its own."""
        tails = [self.lengths[row] + length for row, length in self.tails]
        return self._bounds([*self.lengths, *tails])

    @cached_property
    def keys(self) -> torch.Tensor:
        """The index of each key among the tokens, int64 on the device."""
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


def _alike(rows: list[list[int]], most_padding: int) -> list[list[list[int]]]:
    """Group rows by similar length. A row's first two numbers are its tokens and its prompt's.

    A list grows while its padding is at most `most_padding` pairs of query and key.
    """
    lists: list[list[list[int]]] = []
    longest = least = most = needed = 0
    # The longest row of a list comes first, and the others are padded to its length.
    for row in sorted(rows, reverse=True):
        own, prompt, *_ = row
        fits = False
        if lists:
            pairs = (len(lists[-1]) + 1) * longest * (max(most, prompt) + longest)
            fits = pairs - needed - own * (prompt + own) <= most_padding
            # Prompts of different lengths need a mask for each row.
            if not least == prompt == most:
                fits = fits and pairs <= MOST_MASKED
        if not fits:
            lists.append([])
            longest, least, most, needed = own, prompt, prompt, 0
        lists[-1].append(row)
        least = min(least, prompt)
        most = max(most, prompt)
        needed += own * (prompt + own)
    return [alike[::-1] for alike in reversed(lists)]


def _mask(prompts: np.ndarray, queries: int) -> torch.Tensor:
    """Return the mask to add to the scores of queries after prompts of `prompts` [rows] tokens.

    It is float32 [rows, 1, queries, longest prompt + queries], with 1 row if all prompts are equal:
    0 up to a query's own position, -inf after it.
    """
    if (prompts == prompts[0]).all():
        prompts = prompts[:1]
    own = prompts[:, None, None, None] + np.arange(queries)[:, None]
    unseen = np.arange(prompts.max() + queries) > own
    return torch.zeros(unseen.shape).masked_fill_(torch.from_numpy(unseen), -torch.inf)


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
    return _by_blocks(query, key, value, rows, scaling)


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
    """Return the result of `attend_packed`, computed by FlashAttention."""
    from torch.nn.attention.varlen import varlen_attn

    # Newer ones ask whether key and value may have fewer heads; PyTorch 2.11 takes them unasked.
    asks = "enable_gqa" in inspect.signature(varlen_attn).parameters
    groups: dict[str, Any] = {"enable_gqa": True} if asks and query.shape[1] != key.shape[1] else {}

    # The last query of a sequence attends to its last key, so a tail to its whole prompt.
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
        **groups,
    )
    assert isinstance(attended, torch.Tensor)
    return attended


def _by_blocks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rows: PackedRows,
    scaling: float | None,
) -> torch.Tensor:
    """Return the result of `attend_packed`, computed by one call for each block."""
    blocks = rows.blocks(query[0].numel())
    if query.device.type == "cpu" and query.shape[-1] == value.shape[-1]:
        return _Blocks.apply(query, key, value, blocks, scaling)
    batches = _batches(query, key, value, blocks)
    return blocks.tokens_of([_causal(q, k, v, scaling, mask) for q, k, v, mask in batches])


def _batches(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, blocks: Blocks
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]]:
    """Yield query, key and value [rows, heads, S, D] of each block, and its mask."""
    masks = [None if block.mask is None else block.mask.to(query.dtype) for block in blocks.blocks]
    batches = blocks.queries_of(query), blocks.keys_of(key), blocks.keys_of(value)
    return zip(*batches, masks, strict=True)


class _Blocks(torch.autograd.Function):
    """All blocks as one autograd node, on a CPU, by the kernel of scaled_dot_product_attention.

    A node for every step of every block takes as long as the arithmetic of short rows, and would
    keep each block's result, and the keys that were gathered for it, for the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        blocks: Blocks,
        scaling: float | None,
    ) -> torch.Tensor:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        attended, sums = [], []
        for q, k, v, mask in _batches(query, key, value, blocks):
            out, logsumexp = kernel(q, k, v, 0.0, mask is None, attn_mask=mask, scale=scaling)
            attended.append(out)
            sums.append(logsumexp)
        result = blocks.tokens_of(attended)
        ctx.blocks = blocks
        ctx.scaling = scaling
        ctx.save_for_backward(query, key, value, result, *sums)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        query, key, value, result, *sums = ctx.saved_tensors
        blocks = ctx.blocks
        grads = []
        for (q, k, v, mask), given, out, logsumexp in zip(
            _batches(query, key, value, blocks),
            # The outputs of padding have no gradient.
            blocks.queries_of(grad, clear=True),
            blocks.queries_of(result),
            sums,
            strict=True,
        ):
            causal = mask is None
            found = kernel(
                given, q, k, v, out, logsumexp, 0.0, causal, attn_mask=mask, scale=ctx.scaling
            )
            grads.append(found)

        # A prompt's keys and values also get the gradients of all its tails.
        of_query, of_key, of_value = zip(*grads, strict=True)
        return (
            blocks.tokens_of(of_query),
            blocks.key_sums_of(of_key, len(key)),
            blocks.key_sums_of(of_value, len(value)),
            None,
            None,
        )


AttentionInterface.register(NAME, attend)
