"""Batches and values as messages: small columns inside, larger ones in the runtime's store, by handle.

A message is one pickled blob, with two lists beside it: `handles` (objects in the store, fetched when a column is read)
and `replies` (results of other calls, which the runtime delivers before the call starts). Names, lengths and indexes
travel in the blob; tensors larger than `INLINE_BYTES` per message never do.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any, Protocol

import cloudpickle
import numpy as np
import torch

from hybridflow.core.batch import Batch, LocalTable, PromisedTable, Table, View
from hybridflow.core.columns import Column, Index, _positions
from hybridflow.core.metrics import Metrics

INLINE_BYTES = 4096
"""Columns that together are at most this large travel inside the message (an object in the store costs about 1 ms)."""
OWN_OBJECT_BYTES = 1 << 20
"""Columns from this size on get an object each; smaller ones of one message share one."""

_TORCH = {str(d).removeprefix("torch."): d for d in (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.uint16, torch.uint32, torch.uint64,
)}  # fmt: skip
_BITS = {"bfloat16": torch.int16, "float8_e4m3fn": torch.uint8, "float8_e5m2": torch.uint8}
"""dtypes that numpy does not have travel as the integers of their bits."""


class Store(Protocol):
    """Where large columns live between the call that made them and the ones that read them."""

    def put(self, block: list[np.ndarray]) -> Any: ...
    def get(self, handle: Any) -> list[np.ndarray]: ...


def _to_numpy(tensor: torch.Tensor) -> tuple[str, np.ndarray]:
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in _TORCH:
        raise TypeError(f"columns of dtype {tensor.dtype} cannot be sent; known are {', '.join(_TORCH)}")
    tensor = tensor.detach().cpu().contiguous()
    return name, (tensor.view(_BITS[name]) if name in _BITS else tensor).numpy()


def _to_torch(dtype: str, array: np.ndarray) -> torch.Tensor:
    """A tensor of its own memory: a view of the store could be written to and change what others read."""
    tensor = torch.from_numpy(np.array(array, copy=True, order="C"))
    return tensor.view(_TORCH[dtype]) if dtype in _BITS else tensor


def _small_ints(array: np.ndarray) -> np.ndarray:
    """The same non-negative integers in the smallest dtype, for the wire."""
    return array.astype(np.min_scalar_type(int(array.max()))) if len(array) else array.astype(np.uint8)


def _runs(array: np.ndarray) -> tuple[np.ndarray, int]:
    """(values, repeats): what `Batch.repeat` makes is sent as one entry a run."""
    if len(array) > 1 and array[0] == array[1]:
        changes = np.flatnonzero(np.diff(array))
        times = int(changes[0]) + 1 if len(changes) else len(array)
        if len(array) % times == 0 and (array.reshape(-1, times) == array[::times, None]).all():
            return array[::times], times
    return array, 1


def _encode_index(index: Index | None) -> Any:
    if index is None:
        return None
    if isinstance(index, slice):
        return (index.start, index.stop)
    values, times = _runs(np.asarray(index))
    small = _small_ints(values)
    return (small.dtype.str, small.tobytes(), times)


def _decode_index(wire: Any) -> Index | None:
    if wire is None:
        return None
    if len(wire) == 2:
        return slice(wire[0], wire[1], 1)
    values = np.frombuffer(wire[1], dtype=wire[0]).astype(np.int64)
    return np.repeat(values, wire[2]) if wire[2] > 1 else values


class StoredTable(Table):
    """Columns by handle: `metas[name] = (kind, dtype, lengths key, block, place in the block)`."""

    def __init__(self, rows: int, metas: dict[str, tuple], lengths: list[np.ndarray], blocks: list[Any], store: Store):
        self._rows, self.metas, self.lengths, self.blocks, self.store = rows, metas, lengths, blocks, store

    @property
    def rows(self) -> int:
        return self._rows

    def names(self) -> tuple[str, ...]:
        return tuple(self.metas)

    def read(self, name: str, index: Index | None) -> Column:
        kind, dtype, lengths_at, block, place = self.metas[name]
        held = self.blocks[block]
        array = (held if isinstance(held, list) else self.store.get(held))[place]
        if kind == "object":
            column = Column(pickle.loads(array.tobytes()))
            return column if index is None else column.take(index)
        if kind == "row":
            return Column(_to_torch(dtype, array if index is None else array[index]))
        lengths = self.lengths[lengths_at].astype(np.int64)
        if index is None:
            return Column(_to_torch(dtype, array), lengths)
        ends = np.cumsum(lengths)
        if isinstance(index, slice):
            first = int(ends[index.start - 1]) if index.start else 0
            last = int(ends[index.stop - 1]) if index.stop > index.start else first
            return Column(_to_torch(dtype, array[first:last]), lengths[index])
        taken = lengths[index]
        return Column(_to_torch(dtype, array[_positions(ends[index] - taken, taken)]), taken)


def _pack(columns: dict[str, Column], store: Store) -> tuple:
    """Columns -> (rows, metas, lengths, blocks): blocks are lists of arrays (inline) or handles."""
    metas, lengths, length_keys, arrays = {}, [], {}, []
    for name, column in columns.items():
        at = -1
        if column.lengths is not None:
            key = column.lengths.tobytes()
            if key not in length_keys:
                length_keys[key] = len(lengths)
                lengths.append(_small_ints(column.lengths))
            at = length_keys[key]
        if isinstance(column.values, list):
            dtype, array = "", np.frombuffer(cloudpickle.dumps(column.values), dtype=np.uint8)
        else:
            dtype, array = _to_numpy(column.values)
        metas[name] = (column.kind, dtype, at, array)
        arrays.append(array)
    rows = next(iter(columns.values())).rows if columns else 0
    if sum(a.nbytes for a in arrays) <= INLINE_BYTES:
        placed = {n: (k, d, at, 0, i) for i, (n, (k, d, at, _)) in enumerate(metas.items())}
        return rows, placed, lengths, [arrays]
    return rows, *_put(metas, lengths, store)


def _put(metas: dict[str, tuple], lengths: list[np.ndarray], store: Store) -> tuple:
    placed, shared, own = {}, [], []
    for name, (kind, dtype, at, array) in metas.items():
        if array.nbytes >= OWN_OBJECT_BYTES:
            own.append(array)
            placed[name] = (kind, dtype, at, len(own), 0)
        else:
            placed[name] = (kind, dtype, at, 0, len(shared))
            shared.append(array)
    return placed, lengths, [store.put(shared) if shared else [], *(store.put([a]) for a in own)]


class _Pickler(cloudpickle.Pickler):
    """cloudpickle sends what a worker cannot import (a class of a script or a notebook) by value."""

    def __init__(self, stream: io.BytesIO, encoder: Encoder):
        super().__init__(stream, protocol=5)
        self.encoder = encoder

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) is Batch:
            return self.encoder.batch(obj)
        if type(obj) is Metrics:
            return ("m", obj.means, obj.maxima)
        return None


class Encoder:
    """Turns values that may hold batches, anywhere inside, into (blob, handles, replies)."""

    def __init__(self, store: Store):
        self.store = store
        self.handles: list[Any] = []
        self.replies: list[Any] = []
        self._packed: dict[tuple, tuple] = {}

    def dumps(self, value: Any) -> bytes:
        stream = io.BytesIO()
        _Pickler(stream, self).dump(value)
        return stream.getvalue()

    def batch(self, batch: Batch) -> tuple:
        views = [self._view(view.narrow()) for view in batch.views]
        metrics = batch._metrics
        return ("b", views, (metrics.means, metrics.maxima) if metrics else None)

    def _view(self, view: View) -> tuple:
        if len(view.tables) == 1 and isinstance(table := view.tables[0], LocalTable):
            names = view.renames or {n: n for n in table.columns}
            columns = {new: table.read(old, view.index) for new, old in names.items()}
            return ([self._columns(table, view, columns)], None, None)
        tables = [self._table(t, view.renames) for t in view.tables]
        renames = view.renames if view.renames and any(k != v for k, v in view.renames.items()) else None
        if renames is None and view.renames is not None and any(t[0] != "s" for t in tables):
            renames = view.renames
        return (tables, _encode_index(view.index), renames)

    def _columns(self, table: LocalTable, view: View, columns: dict[str, Column]) -> tuple:
        rows, metas, lengths, blocks = _pack(columns, self.store)
        if not columns:
            rows = view.rows
        return ("s", rows, metas, lengths, [b if isinstance(b, list) else self._handle(b) for b in blocks])

    def _table(self, table: Table, renames: dict[str, str] | None) -> tuple:
        if isinstance(table, StoredTable):
            wanted = set(renames.values()) if renames is not None else set(table.metas)
            metas = {n: m for n, m in table.metas.items() if n in wanted}
            used = {m[3] for m in metas.values()}
            blocks = [
                (b if isinstance(b, list) else self._handle(b)) if i in used else [] for i, b in enumerate(table.blocks)
            ]
            return ("s", table.rows, metas, table.lengths, blocks)
        if isinstance(table, LocalTable):
            return self._columns(table, View((table,)), table.columns)
        assert isinstance(table, PromisedTable)
        if table.reply is not None:
            if table.reply not in self.replies:
                self.replies.append(table.reply)
            return ("p", self.replies.index(table.reply), table.known_rows, table.known_names)
        return ("n", self.batch(table.batch()))

    def _handle(self, handle: Any) -> int:
        if handle not in self.handles:
            self.handles.append(handle)
        return self.handles.index(handle)


class Decoder(pickle.Unpickler):
    """The inverse of `Encoder`, where the message arrived. `resolve(i)` gives the batch of reply i."""

    def __init__(self, blob: bytes, handles: list[Any], store: Store, resolve: Callable[[int], Batch] | None = None):
        super().__init__(io.BytesIO(blob))
        self.handles, self.store, self.resolve = handles, store, resolve

    def persistent_load(self, pid: tuple) -> Any:
        if pid[0] == "m":
            return Metrics(pid[1], pid[2])
        return self._batch(pid)

    def _batch(self, wire: tuple) -> Batch:
        batch = Batch.of_views(
            View(tuple(self._table(t) for t in tables), _decode_index(index), renames)
            for tables, index, renames in wire[1]
        )
        if wire[2] is not None:
            batch._metrics = Metrics(*wire[2])
        return batch

    def _table(self, wire: tuple) -> Table:
        if wire[0] == "s":
            _, rows, metas, lengths, blocks = wire
            held = [b if isinstance(b, list) else self.handles[b] for b in blocks]
            return StoredTable(rows, metas, lengths, held, self.store)
        if wire[0] == "p":
            _, at, rows, names = wire
            assert self.resolve is not None
            return PromisedTable(lambda resolve=self.resolve, at=at: resolve(at), rows, names)
        return PromisedTable(lambda wire=wire: self._batch(wire[1]), None, None)
