"""The fast decoder: runs Llama-like models over a KV cache with one left-aligned lane per sequence.

A layer's keys (and alike its values) are lanes of `stride` columns, one column per token:

    | row 0, head 0 | row 0, head 1 | row 1, head 0 | row 1, head 1 | ...
    | k k k k k . . | k k k k k . . | k k . . . . . | k k . . . . . |      lengths = [5, 2, ...]

A new token is written at column lengths[row] of its row's lanes. Attention reads the first n
columns of all lanes, and a mask hides those behind each lane's own length.

Shapes: R rows (live sequences), G prompts of a prefill, P their padded length, N tokens of a call,
H hidden, h query heads, kv key heads, g = h / kv, d head size, S capacity of a lane, n positions
attended to. Under tensor parallelism heads are this rank's. H and the vocabulary V are whole, and
ranks meet after the embedding, after both halves of each block, and for the logits.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from hybridflow.backends.transformers.config import LANE
from hybridflow.backends.transformers.llama import Layer, LlamaWeights
from hybridflow.kit import onednn

CUT_ON_CPU = 1 << 15
"""Elements of keys that a cut must save: attention over each part costs about 20 microseconds."""
CUT_ON_GPU = 1 << 22
"""The same on a GPU, where a part has some kernels of its own. Not measured yet."""
DISORDER = 1.25
"""Rows are sorted by length if that lowers the cost of attention by more than this factor."""


class FastDecoder:
    """Rows 0 .. R-1 are live. Row r has its keys and values at columns 0 .. lengths[r]-1 of lane r.

    Cache tensors are None, and the lists empty, while nothing is reserved.
    """

    joins = True
    """Whether new rows can be admitted beside live ones."""
    cache: Any
    """Keys and values of all layers, [layers, 2, columns of all lanes, d]."""
    rows: int
    """Number of reserved rows."""
    capacity: int
    """Number of columns that a lane can have, S."""
    stride: int
    """Number of columns that a lane has now; on a GPU always S."""
    plain: bool
    """Whether attention is plain products rather than a fused kernel (float32 on CPU)."""
    lengths: np.ndarray
    """Tokens in the lanes of each live row, int64 [R]."""
    _onednn: bool
    """Whether products of many rows use oneDNN."""
    _lanes: Any
    """The cache as [layers, 2, rows, kv, stride, d]."""
    _tables: list[tuple[torch.Tensor, ...]]
    """Each layer's keys and values as [rows * kv, stride, d]."""
    _flat: list[tuple[torch.Tensor, ...]]
    """Each layer's keys and values as [columns of all lanes, d]."""
    _columns: torch.Tensor
    """The numbers from 0 to S-1 at least, int64."""
    _cis: torch.Tensor
    """Rotary factors amplitude * e^(i t frequency) of each position t, complex64 [S, d/2]."""
    _next: Any
    """The cached result of `_places`; None after rows or lanes have changed."""

    def __init__(
        self,
        config,
        weights: LlamaWeights,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.weights = weights
        self.shape = weights.shape
        self.split = weights.split
        self.dtype = dtype
        self.device = device
        # Plain products beat the fused kernel on CPU: 0.26 against 0.36 ms for 128 rows of 38
        # tokens (4 heads of 32).
        self.plain = device.type == "cpu" and dtype == torch.float32
        self._onednn = self.plain and onednn.is_faster()

        # Constants of rotary embeddings, attention scores and norms
        self._frequencies, self._amplitude = _rotary(config)
        self._scale = 1 / math.sqrt(self.shape.head_dim)
        self._eps = torch.tensor(self.shape.eps, device=device)
        self._columns = torch.zeros(0, dtype=torch.int64, device=device)
        self.free()

    # --- memory ---

    def row_bytes(self, capacity: Any) -> Any:
        """Return the bytes of the KV cache for one sequence of `capacity` tokens, or for several's.

        `capacity` is an int, or an array of them.
        """
        shape = self.shape
        per_column = 2 * shape.layers * shape.kv_heads * shape.head_dim
        return per_column * _round_up(capacity, LANE) * self.dtype.itemsize

    @property
    def reserved_bytes(self) -> int:
        """The bytes of the cache."""
        return 0 if self.cache is None else self.cache.nbytes

    @torch.inference_mode()
    def reserve(self, rows: int, capacity: int) -> None:
        """Allocate a cache for `rows` sequences of `capacity` tokens, with the live rows.

        Live rows must fit into it. A cache that is large enough is kept.
        """
        kv_heads = self.shape.kv_heads
        capacity = _round_up(capacity, LANE)
        columns = rows * kv_heads * capacity
        live = len(self.lengths)
        if self.cache is not None and self.cache.shape[2] >= columns:
            cache = self.cache
        else:
            # Without live rows the old cache is freed before the new one is allocated.
            if not live:
                self.free()
            # Masked columns are multiplied by 0, so they must be finite.
            size = (self.shape.layers, 2, columns, self.shape.head_dim)
            cache = _zeros(size, self.dtype, self.device)

        self.rows = rows
        self.capacity = capacity
        self._tabulate(capacity)
        # On CPU lanes begin empty, and `_widen` lets them grow.
        stride = capacity
        if self.plain:
            stride = min(self.stride, capacity) if live else 0
        self._lay_out(cache, stride)

    def _tabulate(self, capacity: int) -> None:
        """Make tables of positions up to `capacity`."""
        if len(self._columns) >= capacity:
            return
        self._columns = torch.arange(capacity, device=self.device)

        # Rotary factors from their absolute values and angles
        angles = torch.arange(capacity)[:, None].float() * self._frequencies
        amplitudes = torch.full_like(angles, self._amplitude)
        self._cis = torch.polar(amplitudes, angles).to(self.device)

    def _lay_out(self, cache: torch.Tensor, stride: int) -> None:
        """Divide `cache` into lanes of `stride` columns, and move the live rows into them."""
        before = self._lanes
        stays = cache is self.cache and stride == self.stride
        self.cache = cache
        self.stride = stride
        self._next = None

        # Views of the same memory, in the shapes that its readers need.
        kv_heads = self.shape.kv_heads
        size = self.shape.head_dim
        lanes = self.rows * kv_heads
        used = cache[:, :, : lanes * stride]
        self._lanes = used.view(self.shape.layers, 2, self.rows, kv_heads, stride, size)
        self._tables = []
        self._flat = []
        for pair in used:
            tables = pair.view(2, lanes, stride, size)
            self._tables.append(tables.unbind())
            self._flat.append(pair.unbind())

        # Old and new lanes may overlap in memory, hence the clone.
        live = (slice(None), slice(len(self.lengths)), slice(None), slice(self.longest))
        if self.longest and not stays:
            for old, new in zip(before, self._lanes, strict=True):
                new[live] = old[live].clone()

    def _widen(self, columns: int) -> None:
        """Widen lanes to at least `columns` columns.

        On CPU lanes grow with the rows. A high max_tokens that no sequence reaches then costs no
        memory, and leaves no gaps between lanes.
        """
        if columns > self.stride:
            grown = columns + max(32, columns // 2)
            self._lay_out(self.cache, min(grown, self.capacity))

    def free(self) -> None:
        """Free the cache; all rows are dropped."""
        self.cache = None
        self._lanes = None
        self._tables = []
        self._flat = []
        self._next = None
        self.rows = 0
        self.capacity = 0
        self.stride = 0
        self.lengths = np.zeros(0, np.int64)

    @property
    def longest(self) -> int:
        """The number of tokens in the fullest live lane."""
        return int(self.lengths.max(initial=0))

    # --- rows ---

    def order(self, alive: np.ndarray) -> np.ndarray:
        """Return the live rows, bool [R] -> int64 [live], in the order that they should have.

        Rows from the end fill the holes of finished rows, so that few move. If attention would be
        much slower because rows of similar lengths are not neighbours, all are sorted.
        """
        index = fill_holes(alive)
        by_length = np.argsort(-self.lengths[index], kind="stable")
        if self._attended(index) > DISORDER * self._attended(index[by_length]):
            return index[by_length]
        return index

    def _attended(self, index: np.ndarray) -> int:
        """Return how many columns these rows would attend to in all, in this order."""
        lengths = self.lengths[index]
        parts = cut(lengths, self._least_spared())
        return sum((last - first) * int(lengths[first:last].max()) for first, last in parts)

    def _least_spared(self) -> int:
        """Return the number of columns of a row that a cut between rows must save."""
        least = CUT_ON_CPU if self.device.type == "cpu" else CUT_ON_GPU
        return least // (self.shape.kv_heads * self.shape.head_dim)

    @torch.inference_mode()
    def keep(self, index: np.ndarray) -> None:
        """Make row index[i] row i; rows not in `index` are dropped.

        Only rows whose number changes are moved.
        """
        present = np.arange(len(index))
        moved = np.flatnonzero(index != present)
        self.lengths = self.lengths[index]
        self._next = None
        if len(moved) == 0:
            return

        # Indexing by a tensor copies, so a row may be source and target.
        target = torch.from_numpy(moved).to(self.device)
        source = torch.from_numpy(index[moved]).to(self.device)
        longest = int(self.lengths[moved].max())
        states = self._lanes[:, :, source, :, :longest]
        self._lanes[:, :, target, :, :longest] = states

    @torch.inference_mode()
    def admit(
        self,
        contexts: list[np.ndarray],
        repeats: list[int],
    ) -> torch.Tensor:
        """Prefill each context once, and append `repeats` rows for it.

        Returns logits float32 [sum(repeats), V].
        """
        # Pad the contexts to one array [G, P].
        sizes = np.array([len(context) for context in contexts])
        ids = np.zeros((len(contexts), sizes.max()), np.int64)
        for row, context in zip(ids, contexts, strict=True):
            row[: len(context)] = context

        # expand: the context of each new row, where contexts have several.
        owners = np.repeat(np.arange(len(contexts)), repeats)
        count = len(owners)
        expand = None
        if count > len(contexts):
            expand = torch.from_numpy(owners).to(self.device)

        # Append the rows after the live ones.
        self._widen(ids.shape[1] + 1)
        first = len(self.lengths)
        self.lengths = np.concatenate([self.lengths, sizes[owners]])
        self._next = None

        tokens = torch.from_numpy(ids).to(self.device)
        logits = self._prefill(tokens, torch.from_numpy(sizes), first, count, expand)
        if expand is None:
            return logits
        return logits.index_select(0, expand)

    # --- the model ---

    def _prefill(
        self,
        ids: torch.Tensor,
        sizes: torch.Tensor,
        first: int,
        count: int,
        expand: torch.Tensor | None,
    ) -> torch.Tensor:
        """Run prompts `ids` [G, P], and fill the lanes of rows `first` to `first + count`.

        Prompts are padded at the right, so that no token attends to padding. Returns the logits
        after each prompt's last token, float32 [G, V].
        """
        heads = self.shape.heads
        kv_heads = self.shape.kv_heads
        group = self.shape.group
        size = self.shape.head_dim
        prompts, width = ids.shape
        rows = slice(first, first + count)

        # Every kv head of every token has its rotation, [G * P * kv, 1, d/2].
        cis = self._cis[:width].repeat_interleave(kv_heads, 0)
        cis = cis.repeat(prompts, 1)[:, None]
        x = self._embed(ids.view(-1))
        for layer, lanes in zip(self.weights.layers, self._lanes, strict=True):
            rotated, values = self._project(x, layer, cis)

            # Heads before positions, as attention needs them: [G, heads, P, d].
            rotated = rotated.view(prompts, width, kv_heads, group + 1, size)
            queries = rotated[:, :, :, :group].reshape(prompts, width, heads, size)
            queries = queries.transpose(1, 2)
            keys = rotated[:, :, :, group].transpose(1, 2)
            values = values.view(prompts, width, kv_heads, size).transpose(1, 2)

            _fill(lanes[0, rows], keys, expand)
            _fill(lanes[1, rows], values, expand)
            mixed = F.scaled_dot_product_attention(
                queries,
                keys,
                values,
                is_causal=True,
                enable_gqa=group > 1,
            )
            mixed = mixed.transpose(1, 2)
            self._finish_block(x, mixed.reshape(prompts * width, -1), layer)

        # Only each prompt's last token needs logits.
        last = torch.arange(prompts) * width + sizes - 1
        return self._logits(x.index_select(0, last.to(self.device)))

    @torch.inference_mode()
    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Append token [R] to every row; return logits float32 [R, V] of the next ones."""
        group = self.shape.group
        self._widen(self.longest + 1)
        if self._next is None:
            self._next = self._places()
        positions, columns, cuts = self._next
        cis = self._cis.index_select(0, positions)[:, None]
        parts = [self._part(first, last, positions) for first, last in cuts]

        x = self._embed(tokens)
        layers = zip(self.weights.layers, self._tables, self._flat, strict=True)
        for layer, (keys, values), (flat_keys, flat_values) in layers:
            rotated, new_values = self._project(x, layer, cis)
            # The new token attends to itself too, so its lanes are written first.
            flat_keys.index_copy_(0, columns, rotated.select(1, group))
            flat_values.index_copy_(0, columns, new_values)
            mixed = self._attend(rotated.narrow(1, 0, group), keys, values, parts)
            self._finish_block(x, mixed.view(len(tokens), -1), layer)

        # The host also counts lengths, so that it need not wait for the device.
        positions += 1
        columns += 1
        self.lengths += 1
        return self._logits(x)

    def _places(self) -> tuple[torch.Tensor, torch.Tensor, list[tuple[int, int]]]:
        """Return the position of each lane's next token, its column, and the parts of rows.

        Position, and column in `_flat`, are int64 [R * kv]; a part, whose rows attend together, is
        its first row and the one after its last.
        """
        kv_heads = self.shape.kv_heads
        positions = np.repeat(self.lengths, kv_heads)
        columns = positions + np.arange(len(positions)) * self.stride
        cuts = cut(self.lengths, self._least_spared())
        return (
            torch.from_numpy(positions).to(self.device),
            torch.from_numpy(columns).to(self.device),
            cuts,
        )

    def _part(
        self,
        first: int,
        last: int,
        positions: torch.Tensor,
    ) -> tuple[int, int, int, torch.Tensor]:
        """Return first lane, number of lanes, columns to attend to, and mask of some rows."""
        kv_heads = self.shape.kv_heads
        start = first * kv_heads
        count = (last - first) * kv_heads
        columns = int(self.lengths[first:last].max()) + 1
        if not self.plain:
            columns = _round_up(columns, LANE)
        return start, count, columns, self._mask(positions.narrow(0, start, count), columns)

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return embeddings, [N] -> [N, H].

        Where the vocabulary is cut, each rank looks up its own tokens, and has zeros for the
        others; the sum over the ranks is the embedding.
        """
        table = self.weights.embed
        if self.split.tp == 1:
            return F.embedding(tokens, table)

        # Rows of this rank's part of the table
        rows = tokens - self.split.at * len(table)
        elsewhere = (rows < 0) | (rows >= len(table))
        x = F.embedding(rows.masked_fill_(elsewhere, 0), table)
        return self.split.sum(x.masked_fill_(elsewhere[:, None], 0))

    def _mask(self, positions: torch.Tensor, n: int) -> torch.Tensor:
        """Return the mask to add to the scores, [R * kv, 1, n].

        It is 0 up to each lane's own position, and -inf after it.
        """
        after = self._columns[:n] > positions[:, None]
        mask = torch.zeros(after.shape, dtype=self.dtype, device=self.device)
        return mask.masked_fill_(after, float("-inf"))[:, None]

    def _attend(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        parts: list[tuple[int, int, int, torch.Tensor]],
    ) -> torch.Tensor:
        """Return attention of queries [R * kv, g, d] over each lane's own columns, [R * kv, g, d].

        Keys and values are all lanes, [rows * kv, stride, d]. Each of `_part`'s parts attends to as
        many columns as its longest row has.
        """
        attend = self._attend_plain if self.plain else self._attend_fused
        mixed = []
        for first, count, columns, mask in parts:
            used = (slice(first, first + count), slice(columns))
            mixed.append(attend(queries.narrow(0, first, count), keys[used], values[used], mask))
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed)

    def _attend_plain(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor,
    ) -> torch.Tensor:
        """Return softmax(q k^T / sqrt(d) + mask) v: [R * kv, g, d] over [R * kv, n, d]."""
        keys = keys.transpose(1, 2)
        scores = torch.baddbmm(mask, queries, keys, alpha=self._scale)
        return torch.bmm(scores.softmax(-1), values)

    def _attend_fused(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor,
    ) -> torch.Tensor:
        """Return the same as `_attend_plain`, by a fused kernel.

        The g queries of a key head are the kernel's query length, so that keys are not repeated.
        """
        mask = mask.expand(-1, self.shape.group, -1)
        mixed = F.scaled_dot_product_attention(
            queries[:, None],
            keys[:, None],
            values[:, None],
            mask[:, None],
        )
        return mixed.reshape(queries.shape)

    def _project(
        self,
        x: torch.Tensor,
        layer: Layer,
        cis: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return rotated queries and key [N * kv, g + 1, d], and values [N * kv, d].

        `x` is [N, H], `cis` [N * kv, 1, d/2].
        """
        group = self.shape.group
        normed = self._norm(x, layer.norm1)
        fused = self._product(normed, layer.qkv, layer.qkv_bias)

        # Each kv head has its g query heads, its key and its value side by side.
        fused = fused.view(-1, group + 2, self.shape.head_dim)
        heads = fused[:, : group + 1]
        values = fused[:, group + 1]
        if layer.q_norm is not None:
            heads = self._norm_heads(heads, layer)
        return self._rotate(heads, cis), values

    def _norm_heads(self, heads: torch.Tensor, layer: Layer) -> torch.Tensor:
        """Normalise each query head and key (qwen3), [N * kv, g + 1, d]."""
        group = self.shape.group
        size = (self.shape.head_dim,)
        eps = self.shape.eps
        queries = F.rms_norm(heads[:, :group], size, layer.q_norm, eps)
        keys = F.rms_norm(heads[:, group:], size, layer.k_norm, eps)
        return torch.cat([queries, keys], 1)

    def _rotate(self, heads: torch.Tensor, cis: torch.Tensor) -> torch.Tensor:
        """Rotate heads [N * kv, g + 1, d] by their positions, in float32.

        Neighbouring elements (a, b) are a complex number a + ib, multiplied by e^(i angle).
        """
        if self.dtype == torch.float32:
            rotated = heads.view(torch.complex64) * cis
            return rotated.view(torch.float32)

        rotated = heads.float().view(torch.complex64) * cis
        return rotated.view(torch.float32).to(self.dtype)

    def _finish_block(
        self,
        x: torch.Tensor,
        mixed: torch.Tensor,
        layer: Layer,
    ) -> None:
        """Add the output projection of `mixed`, and then the MLP, to `x` [N, H] in place."""
        self._add_product(x, mixed, layer.out)
        if layer.out_bias is not None:
            x += layer.out_bias

        # MLP(x) = (silu(y W_gate) * y W_up) W_down with y = RMSNorm(x)
        gate_up = self._product(self._norm(x, layer.norm2), layer.gate_up)
        gate, up = gate_up.chunk(2, 1)
        self._add_product(x, F.silu(gate).mul_(up), layer.down)

    def _product(
        self,
        x: torch.Tensor,
        matrix: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return x @ matrix + bias, [N, in], [in, out], [out] -> [N, out]."""
        if self._onednn and onednn.fits(x):
            return onednn.linear(x, matrix.t(), bias)
        if bias is None:
            return torch.mm(x, matrix)
        return torch.addmm(bias, x, matrix)

    def _add_product(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        matrix: torch.Tensor,
    ) -> None:
        """Compute x += y @ matrix, summed over the ranks."""
        if self.split.tp > 1:
            x += self.split.sum(self._product(y, matrix))
        elif self._onednn and onednn.fits(y):
            x += onednn.linear(y, matrix.t())
        else:
            x.addmm_(y, matrix)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return RMSNorm(x) = x / sqrt(|x|^2 / H + eps) * weight, for x [N, H]."""
        shape = self.shape
        if not self.plain:
            return F.rms_norm(x, (shape.hidden,), weight, shape.eps)

        # On CPU rms_norm makes six passes over x; this makes three.
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        square = torch.addcmul(self._eps, length, length, value=1 / shape.hidden)
        scale = square.rsqrt_()
        return torch.mul(x, scale).mul_(weight)

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits float32 [N, V]; the padding of a cut vocabulary is dropped."""
        x = self._norm(x, self.weights.norm)
        logits = self._product(x, self.weights.head)
        if self.split.tp > 1:
            logits = self.split.columns(logits)[:, : self.shape.vocab]
        return logits.float()


def cut(lengths: np.ndarray, least: int) -> list[tuple[int, int]]:
    """Cut rows of `lengths` int64 [R] into parts: first row of each, and the one after its last.

    A part is as long as its longest row. Each cut saves at least `least` columns in all for the
    rows after it.
    """
    if len(lengths) == 0:
        return []
    # The longest row from each row on: after a cut, no row needs more.
    rest = np.maximum.accumulate(lengths[::-1])[::-1]
    behind = np.arange(len(lengths), 0, -1)
    firsts = [0]
    while True:
        spared = (rest[firsts[-1]] - rest) * behind
        worth = np.flatnonzero(spared >= least)
        if len(worth) == 0:
            return list(zip(firsts, [*firsts[1:], len(lengths)], strict=True))
        firsts.append(int(worth[0]))


def fill_holes(alive: np.ndarray) -> np.ndarray:
    """Return the live rows, bool [R] -> int64 [live]: those from the end fill the holes."""
    count = int(alive.sum())
    index = np.arange(count)
    holes = np.flatnonzero(~alive[:count])
    index[holes] = count + np.flatnonzero(alive[count:])
    return index


def _fill(
    lanes: torch.Tensor,
    states: torch.Tensor,
    expand: torch.Tensor | None,
) -> None:
    """Write keys or values [G, kv, P, d] to the first P columns of lanes [rows, kv, stride, d].

    `expand` is the prompt of each row, int64 [rows]; None where each prompt has one row.
    """
    if expand is not None:
        states = states.index_select(0, expand)
    lanes[:, :, : states.shape[2]] = states


def _round_up(value: int, unit: int) -> int:
    """Return the smallest multiple of `unit` that is at least `value`."""
    return -(-value // unit) * unit


def _zeros(
    size: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """Return zeros.

    On CPU the system allocates their pages on first use, so that unused capacity costs nothing.
    """
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)

    # NumPy has no bfloat16; the zeros of all types have the same bits.
    integer = {2: np.int16, 4: np.int32}[dtype.itemsize]
    return torch.from_numpy(np.zeros(size, integer)).view(dtype)


def _rotary(config) -> tuple[torch.Tensor, float]:
    """Return frequencies float32 [d/2], and the factor on cos and sin (1 except for yarn)."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    embedding = LlamaRotaryEmbedding(config)
    return embedding.inv_freq.float(), float(embedding.attention_scaling)
