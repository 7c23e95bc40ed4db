"""The fast decoder: Llama-like models over a KV cache with one left-aligned lane per sequence.

Shapes: R rows (live sequences), G prompts of a prefill, P its padded length, H hidden, h query heads, kv key heads,
g = h / kv, d head size, S capacity of a lane, n positions attended to. Under tensor parallelism heads are this rank's;
H and the vocabulary V are whole, and ranks meet after the embedding, both halves of each block, and for the logits.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from hybridflow.backends.transformers.llama import Layer, LlamaWeights

_LANE = 64  # a lane's capacity, and n on fused attention kernels, are multiples of this


class FastDecoder:
    """Rows 0 .. R-1 are live. Row r has its keys and values at columns 0 .. lengths[r]-1 of lane r."""

    joins = True
    """New rows can be admitted beside live ones."""
    cache: Any  # tensors while reserved, None when free
    lengths: Any
    rows: int
    capacity: int
    host_lengths: np.ndarray
    _lanes: Any
    _tables: list[tuple[torch.Tensor, ...]]
    _flat: list[tuple[torch.Tensor, ...]]

    def __init__(self, config, weights: LlamaWeights, dtype: torch.dtype, device: torch.device):
        self.weights, self.shape, self.dtype, self.device = weights, weights.shape, dtype, device
        self.split = weights.split
        # Plain products beat the fused kernel on CPU: 0.26 against 0.36 ms for 128 rows of 38 (4 heads of 32).
        self.plain = device.type == "cpu" and dtype == torch.float32
        self._frequencies, self._amplitude = _rotary(config)
        self._scale = 1 / math.sqrt(self.shape.head_dim)
        self._eps = torch.tensor(self.shape.eps, device=device)
        self.free()

    # ---- memory -------------------------------------------------------------------------------------------------

    def row_bytes(self, capacity: int) -> int:
        """Bytes of the KV cache for one sequence of `capacity` tokens."""
        s = self.shape
        return (
            2
            * s.layers
            * s.kv_heads
            * _round_up(capacity, _LANE)
            * s.head_dim
            * self.dtype.itemsize
        )

    def reserve(self, rows: int, capacity: int) -> None:
        """Room for `rows` sequences of `capacity` tokens; forgets all rows. A large enough cache is kept."""
        self.host_lengths = np.zeros(0, np.int64)
        if self.cache is None or self.rows < rows or self.capacity < capacity:
            self.free()
            s = self.shape
            self.rows, self.capacity = rows, _round_up(capacity, _LANE)
            size = (s.layers, 2, rows * s.kv_heads * self.capacity, s.head_dim)
            self.cache = _zeros(
                size, self.dtype, self.device
            )  # zeros: masked columns must be finite
            self.lengths = torch.zeros(rows, dtype=torch.int64, device=self.device)
            self._columns = torch.arange(self.capacity, device=self.device)
            angles = torch.arange(self.capacity)[:, None].float() * self._frequencies
            self._cis = torch.polar(torch.full_like(angles, self._amplitude), angles).to(
                self.device
            )  # [S, d/2]
        self._lay_out(0 if self.plain else self.capacity)

    def _lay_out(self, stride: int) -> None:
        """Lanes of `stride` columns, one after the other from the start of the cache."""
        s = self.shape
        self.stride, lanes = stride, self.rows * s.kv_heads
        used = self.cache[:, :, : lanes * stride]
        self._lanes = used.view(s.layers, 2, self.rows, s.kv_heads, stride, s.head_dim)
        self._tables = [pair.view(2, lanes, stride, s.head_dim).unbind() for pair in used]
        self._flat = [pair.unbind() for pair in used]
        self._starts = torch.arange(lanes, device=self.device) * stride

    def _widen(self, columns: int) -> None:
        """Lanes of at least `columns` columns. On CPU they grow with the rows, so that a high max_tokens that nobody
        reaches costs no memory and leaves no gaps between lanes."""
        if columns <= self.stride:
            return
        old, n, rows = self._lanes, self.longest, len(self.host_lengths)
        self._lay_out(min(columns + max(32, columns // 2), self.capacity))
        if n:
            for before, after in zip(old, self._lanes, strict=True):
                after[:, :rows, :, :n] = before[:, :rows, :, :n].clone()  # the two overlap

    def free(self) -> None:
        self.cache = None
        self.lengths = None
        self._lanes = None
        self._tables = []
        self._flat = []
        self.rows = self.capacity = self.stride = 0
        self.host_lengths = np.zeros(0, np.int64)

    @property
    def longest(self) -> int:
        """Tokens in the fullest live lane."""
        return int(self.host_lengths.max()) if len(self.host_lengths) else 0

    # ---- rows ---------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def keep(self, index: np.ndarray) -> None:
        """Row i becomes what row index[i] was; the others are gone. Moves only rows whose place changes."""
        moved = np.flatnonzero(index != np.arange(len(index)))
        self.host_lengths = self.host_lengths[index]
        if len(moved) == 0:
            return
        target = torch.from_numpy(moved).to(self.device)
        source = torch.from_numpy(index[moved]).to(self.device)
        self.lengths[target] = self.lengths[source]
        n = int(self.host_lengths[moved].max())
        self._lanes[:, :, target, :, :n] = self._lanes[:, :, source, :, :n]

    @torch.inference_mode()
    def admit(self, contexts: list[np.ndarray], repeats: list[int]) -> torch.Tensor:
        """Prefill each context once and append `repeats` rows for it. Returns logits float32 [sum(repeats), V]."""
        sizes = np.array([len(c) for c in contexts])
        ids = np.zeros((len(contexts), sizes.max()), np.int64)
        for row, context in zip(ids, contexts, strict=True):
            row[: len(context)] = context
        owner = np.repeat(np.arange(len(contexts)), repeats)
        expand = torch.from_numpy(owner).to(self.device) if len(owner) > len(contexts) else None
        self._widen(ids.shape[1] + 1)
        first, count = len(self.host_lengths), len(owner)
        self.host_lengths = np.concatenate([self.host_lengths, sizes[owner]])
        self.lengths[first : first + count] = torch.from_numpy(sizes[owner]).to(self.device)
        logits = self._prefill(
            torch.from_numpy(ids).to(self.device), torch.from_numpy(sizes), first, count, expand
        )
        return logits if expand is None else logits.index_select(0, expand)

    # ---- the model ----------------------------------------------------------------------------------------------

    def _prefill(
        self, ids: torch.Tensor, sizes: torch.Tensor, first: int, count: int, expand
    ) -> torch.Tensor:
        """ids [G, P], padded at the right: no token sees padding, which lies after it. Logits [G, V]."""
        s = self.shape
        G, P = ids.shape
        cis = self._cis[:P].repeat_interleave(s.kv_heads, 0).repeat(G, 1)[:, None]
        x = self._embed(ids.view(-1))
        for i, layer in enumerate(self.weights.layers):
            rotated, values = self._project(x, layer, cis)
            rotated = rotated.view(G, P, s.kv_heads, s.group + 1, s.head_dim)
            queries = rotated[:, :, :, : s.group].reshape(G, P, s.heads, s.head_dim).transpose(1, 2)
            keys = rotated[:, :, :, s.group].transpose(1, 2)
            values = values.view(G, P, s.kv_heads, s.head_dim).transpose(1, 2)
            for lanes, made in zip(self._lanes[i], (keys, values), strict=True):
                lanes[first : first + count, :, :P] = (
                    made if expand is None else made.index_select(0, expand)
                )
            mixed = F.scaled_dot_product_attention(
                queries, keys, values, is_causal=True, enable_gqa=s.group > 1
            )
            self._finish_block(x, mixed.transpose(1, 2).reshape(G * P, -1), layer)
        last = (torch.arange(G) * P + sizes - 1).to(self.device)
        return self._logits(x.index_select(0, last))

    @torch.inference_mode()
    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Append token [R] to every row; logits float32 [R, V] of the next ones."""
        s, R = self.shape, len(self.host_lengths)
        n, lanes = self.longest + 1, len(self.host_lengths) * s.kv_heads
        self._widen(n)
        n = n if self.plain else _round_up(n, _LANE)
        positions = self.lengths[:R].repeat_interleave(s.kv_heads)
        write = self._starts[:lanes] + positions
        cis = self._cis.index_select(0, positions)[:, None]
        mask = self._mask(positions, n)
        x = self._embed(tokens)
        attend = self._attend_plain if self.plain else self._attend_fused
        for layer, (keys, values), flat in zip(
            self.weights.layers, self._tables, self._flat, strict=True
        ):
            rotated, new_values = self._project(x, layer, cis)
            flat[0].index_copy_(0, write, rotated[:, s.group])
            flat[1].index_copy_(0, write, new_values)
            mixed = attend(rotated[:, : s.group], keys[:lanes, :n], values[:lanes, :n], mask)
            self._finish_block(x, mixed.view(R, -1), layer)
        self.lengths[:R] += 1
        self.host_lengths += 1
        return self._logits(x)

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """[N] -> [N, H]. Of a divided vocabulary, each rank looks up its own tokens; the others' rows are 0."""
        table = self.weights.embed
        if self.split.tp == 1:
            return F.embedding(tokens, table)
        rows = tokens - self.split.at * len(table)
        elsewhere = (rows < 0) | (rows >= len(table))
        x = F.embedding(rows.masked_fill_(elsewhere, 0), table)
        return self.split.sum(x.masked_fill_(elsewhere[:, None], 0))

    def _mask(self, positions: torch.Tensor, n: int) -> torch.Tensor:
        """Added to the scores: 0 up to each lane's own position, -inf after it. [R * kv, 1, n]."""
        hidden = self._columns[:n] > positions[:, None]
        mask = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device).masked_fill_(
            hidden, float("-inf")
        )
        return mask[:, None]

    def _attend_plain(self, queries, keys, values, mask) -> torch.Tensor:
        """[R * kv, g, d] over [R * kv, n, d]."""
        scores = torch.baddbmm(mask, queries, keys.transpose(1, 2), alpha=self._scale)
        return torch.bmm(scores.softmax(-1), values)

    def _attend_fused(self, queries, keys, values, mask) -> torch.Tensor:
        """The same with the g queries of a key head as the query length, so that keys are not repeated."""
        mask = mask.expand(-1, self.shape.group, -1)
        mixed = F.scaled_dot_product_attention(
            queries[:, None], keys[:, None], values[:, None], mask[:, None]
        )
        return mixed.reshape(queries.shape)

    def _project(
        self, x: torch.Tensor, layer: Layer, cis: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [N, H], cis [N * kv, 1, d/2] -> queries and key, rotated, [N * kv, g + 1, d], and values [N * kv, d]."""
        s, y = self.shape, self._norm(x, layer.norm1)
        fused = (
            torch.mm(y, layer.qkv)
            if layer.qkv_bias is None
            else torch.addmm(layer.qkv_bias, y, layer.qkv)
        )
        fused = fused.view(-1, s.group + 2, s.head_dim)
        turned, values = fused[:, : s.group + 1], fused[:, s.group + 1]
        if layer.q_norm is not None:
            queries = F.rms_norm(turned[:, : s.group], (s.head_dim,), layer.q_norm, s.eps)
            turned = torch.cat(
                [queries, F.rms_norm(turned[:, s.group :], (s.head_dim,), layer.k_norm, s.eps)], 1
            )
        if self.dtype != torch.float32:
            return (turned.float().view(torch.complex64) * cis).view(torch.float32).to(
                self.dtype
            ), values
        return (turned.view(torch.complex64) * cis).view(torch.float32), values

    def _finish_block(self, x: torch.Tensor, mixed: torch.Tensor, layer: Layer) -> None:
        """Output projection and MLP, added to x [N, H] in place."""
        self._add_product(x, mixed, layer.out)
        if layer.out_bias is not None:
            x += layer.out_bias
        gate, up = torch.mm(self._norm(x, layer.norm2), layer.gate_up).chunk(2, 1)
        self._add_product(x, F.silu(gate).mul_(up), layer.down)

    def _add_product(self, x: torch.Tensor, y: torch.Tensor, matrix: torch.Tensor) -> None:
        """x += y @ matrix, summed over the ranks."""
        if self.split.tp == 1:
            x.addmm_(y, matrix)
        else:
            x += self.split.sum(torch.mm(y, matrix))

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if not self.plain:
            return F.rms_norm(x, (self.shape.hidden,), weight, self.shape.eps)
        # On CPU rms_norm is six passes; this is three.
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = torch.addcmul(self._eps, length, length, value=1 / self.shape.hidden).rsqrt_()
        return torch.mul(x, scale).mul_(weight)

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        logits = torch.mm(self._norm(x, self.weights.norm), self.weights.head)
        if self.split.tp > 1:
            logits = self.split.columns(logits)[:, : self.shape.vocab]
        return logits.float()


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on CPU with pages that the system gives out on first use, so that unused capacity costs nothing."""
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    whole = {2: np.int16, 4: np.int32}[dtype.itemsize]
    return torch.from_numpy(np.zeros(size, whole)).view(dtype)


def _rotary(config) -> tuple[torch.Tensor, float]:
    """Frequencies float32 [d/2] and the factor on cos and sin (1 but for yarn)."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    embedding = LlamaRotaryEmbedding(config)
    return embedding.inv_freq.float(), float(embedding.attention_scaling)
