"""Batches and values as messages: small columns inside, larger ones in the runtime's store, by handle.

A message is one pickled blob, with two lists beside it: `handles` (objects in the store, fetched when a column is read)
and `replies` (results of other calls, which the runtime delivers before the call starts). Names, lengths and indexes
travel in the blob; tensors larger than `INLINE_BYTES` per message never do.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from types import FunctionType
from typing import Any

import cloudpickle
import numpy as np
import torch

from hybridflow.core.contracts.runtime import Store
from hybridflow.core.names import find_spec
from hybridflow.core.values.batch import Batch, LocalTable, PromisedTable, Table, View
from hybridflow.core.values.columns import Column, Index, _positions
from hybridflow.core.values.metrics import Metrics

INLINE_BYTES = 4096
"""Columns that together are at most this large travel inside the message (an object in the store costs about 1 ms)."""
OWN_OBJECT_BYTES = 1 << 20
"""Columns from this size on get an object each; smaller ones of one message share one."""
MAX_NESTED = 4
"""Batches of batches (rows of several joined results behind one another) deeper than this are sent as new columns."""

_TORCH = {str(d).removeprefix("torch."): d for d in (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.uint16, torch.uint32, torch.uint64,
)}  # fmt: skip
_BITS = {"bfloat16": torch.int16, "float8_e4m3fn": torch.uint8, "float8_e5m2": torch.uint8}
"""dtypes that numpy does not have travel as the integers of their bits."""
_NUMPY = {
    name: torch.empty(0, dtype=_BITS.get(name, dtype)).numpy().dtype
    for name, dtype in _TORCH.items()
}

Block = list | Any
"""Columns that lie together: a list of (shape, bytes) (inside the message), or a handle of the store."""


class Stored:
    """A handle of the store as a value in a message: it travels beside the blob, so that the runtime keeps the object."""

    __slots__ = ("handle",)

    def __init__(self, handle: Any):
        self.handle = handle


def _to_numpy(tensor: torch.Tensor) -> tuple[str, np.ndarray]:
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in _TORCH:
        raise TypeError(
            f"columns of dtype {tensor.dtype} cannot be sent; known are {', '.join(_TORCH)}"
        )
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return name, (tensor.view(_BITS[name]) if name in _BITS else tensor).numpy()


def _to_torch(dtype: str, array: np.ndarray, index: Index | None) -> torch.Tensor:
    """Those rows as a tensor of its own memory: a view of the store could be written to and change what others read."""
    if isinstance(index, np.ndarray):
        own = array[index]  # numpy copies here
    else:
        own = np.array(array if index is None else array[index], copy=True, order="C")
    tensor = torch.from_numpy(own)
    return tensor.view(_TORCH[dtype]) if dtype in _BITS else tensor


def _pack_ints(array: np.ndarray) -> tuple[str, bytes]:
    """Non-negative integers in the smallest dtype that holds them."""
    small = (
        array.astype(np.min_scalar_type(int(array.max()))) if len(array) else array.astype(np.uint8)
    )
    return small.dtype.str, small.tobytes()


def _unpack_ints(dtype: str, data: bytes) -> np.ndarray:
    return np.frombuffer(data, dtype).astype(np.int64)


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
    values, times = _runs(index)
    return (*_pack_ints(values), times)


def _decode_index(wire: Any) -> Index | None:
    if wire is None:
        return None
    if len(wire) == 2:
        return slice(wire[0], wire[1], 1)
    values = _unpack_ints(wire[0], wire[1])
    return np.repeat(values, wire[2]) if wire[2] > 1 else values


class StoredTable(Table):
    """Columns by handle: `metas[name] = (kind, dtype, place of its lengths, block, place in the block)`."""

    def __init__(
        self,
        rows: int,
        metas: dict[str, tuple],
        lengths: list[tuple[str, bytes]],
        blocks: list[Block],
        store: Store,
    ):
        self._rows, self.metas, self.lengths, self.blocks, self.store = (
            rows,
            metas,
            lengths,
            blocks,
            store,
        )

    @property
    def rows(self) -> int:
        return self._rows

    def names(self) -> tuple[str, ...]:
        return tuple(self.metas)

    def read(self, name: str, index: Index | None) -> Column:
        kind, dtype, lengths_at, block, place = self.metas[name]
        held = self.blocks[block]
        if isinstance(held, list):
            shape, data = held[place]
            array = np.frombuffer(data, _NUMPY.get(dtype, np.dtype(np.uint8))).reshape(shape)
        else:
            array = self.store.get(held)[place]
        if kind == "object":
            column = Column(pickle.loads(array.data))
            return column if index is None else column.take(index)
        if kind == "row":
            return Column(_to_torch(dtype, array, index))
        lengths = _unpack_ints(*self.lengths[lengths_at])
        if index is None:
            return Column(_to_torch(dtype, array, None), lengths)
        ends, taken = np.cumsum(lengths), lengths[index]
        if isinstance(index, slice):
            first = int(ends[index.start - 1]) if index.start else 0
            return Column(_to_torch(dtype, array, slice(first, first + int(taken.sum()))), taken)
        return Column(_to_torch(dtype, array, _positions(ends[index] - taken, taken)), taken)


def _pack(
    columns: Mapping[str, Column], store: Store
) -> tuple[dict, list[tuple[str, bytes]], list[Block]]:
    """Columns -> (metas, lengths, blocks)."""
    metas: dict[str, tuple] = {}
    lengths: dict[tuple[str, bytes], int] = {}  # columns of equal lengths share them
    arrays = []
    for name, column in columns.items():
        at = -1
        if column.lengths is not None:
            at = lengths.setdefault(_pack_ints(column.lengths), len(lengths))
        if isinstance(column.values, list):
            dtype, array = "", np.frombuffer(cloudpickle.dumps(column.values), dtype=np.uint8)
        else:
            dtype, array = _to_numpy(column.values)
        metas[name] = (column.kind, dtype, at)
        arrays.append(array)
    if sum(a.nbytes for a in arrays) <= INLINE_BYTES:
        placed = {name: (*meta, 0, i) for i, (name, meta) in enumerate(metas.items())}
        return placed, list(lengths), [[(a.shape, a.tobytes()) for a in arrays]]
    shared = [a for a in arrays if a.nbytes < OWN_OBJECT_BYTES]
    blocks: list[Block] = [store.put(shared) if shared else []]
    placed, in_shared = {}, 0
    for (name, meta), array in zip(metas.items(), arrays, strict=True):
        if array.nbytes < OWN_OBJECT_BYTES:
            placed[name] = (*meta, 0, in_shared)
            in_shared += 1
        else:
            placed[name] = (*meta, len(blocks), 0)
            blocks.append(store.put([array]))
    return placed, list(lengths), blocks


@lru_cache(None)
def _workers_can_import(module: str) -> bool:
    """Whether importing the module by its name gives the same file; test modules and scripts are not always so."""
    loaded = sys.modules.get(module)
    if loaded is None or getattr(loaded, "__file__", None) is None:
        return True  # built in, or gone: cloudpickle decides
    path = None
    if "." in module:
        parent = sys.modules.get(module.rpartition(".")[0])
        path = getattr(parent, "__path__", None)
        if path is None or not _workers_can_import(module.rpartition(".")[0]):
            return False
    spec = find_spec(module, path)
    return spec is not None and spec.origin in (
        getattr(loaded.__spec__, "origin", None),
        loaded.__file__,
    )


class _Pickler(cloudpickle.Pickler):
    """cloudpickle sends what a worker cannot import (a class of a script, a notebook or a test) by value."""

    def __init__(self, stream: io.BytesIO, encoder: Encoder):
        super().__init__(stream, protocol=5)
        self.encoder = encoder

    def persistent_id(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is Batch:  # as bytes: the pickler asks this method about every object it sees
            return pickle.dumps(self.encoder.batch(obj), protocol=5)
        if kind is Metrics:
            return (obj.means, obj.maxima)
        if kind is Stored:
            return self.encoder._block(obj.handle)
        return None

    def reducer_override(self, obj: Any) -> Any:
        if (
            isinstance(obj, (type, FunctionType))
            and obj.__module__
            and not _workers_can_import(obj.__module__)
        ):
            cloudpickle.register_pickle_by_value(sys.modules[obj.__module__])
        return super().reducer_override(obj)


def _made_of(view: View) -> list[View]:
    """The views behind promises that were kept, so that what calls pass on unchanged does not grow with each call."""
    if len(view.tables) > 1:
        tables = tuple(t for table in view.tables for t in _in_a_row(table))
        return [View(tables, view.index, view.renames, view.only)]
    table = view.tables[0]
    if not isinstance(table, PromisedTable) or table.reply is not None:
        return [view]
    inner = table.batch()
    if view.renames is None:
        views = inner.views if view.only is None else inner.select(sorted(view.only)).views
    else:
        homes: dict[View, dict[str, str]] = {}
        for new, old in view.renames.items():
            homes.setdefault(inner._home(old), {})[new] = old
        views = [home.rename(names) for home, names in homes.items()]
    views = views or [View((LocalTable({}, inner.rows),))]
    return [made for v in views for made in _made_of(v.take(view.index))]


def _in_a_row(table: Table) -> tuple[Table, ...]:
    """The tables of a kept promise that is nothing but tables in a row; else the table itself."""
    if (
        isinstance(table, PromisedTable)
        and table.reply is None
        and len(views := table.batch().views) == 1
    ):
        only = views[0]
        if only.index is None and only.renames is None and only.only is None:
            return tuple(t for inner in only.tables for t in _in_a_row(inner))
    return (table,)


class Encoder:
    """Turns values that may hold batches, anywhere inside, into (blob, handles, replies)."""

    def __init__(self, store: Store):
        self.store = store
        self.handles: list[Any] = []
        self.replies: list[Any] = []
        self._depth = 0

    def dumps(self, value: Any) -> bytes:
        stream = io.BytesIO()
        _Pickler(stream, self).dump(value)
        return stream.getvalue()

    def batch(self, batch: Batch) -> tuple:
        metrics = batch._metrics
        views = [self._view(view.narrow()) for seen in batch.views for view in _made_of(seen)]
        return (views, (metrics.means, metrics.maxima) if metrics else None)

    def _view(self, view: View) -> tuple:
        tables, index, renames, only = view.tables, view.index, view.renames, view.only
        if all(isinstance(t, LocalTable) for t in tables) and (
            len(tables) == 1 or index is not None
        ):
            names = view.names()
            if len(tables) == 1:
                table = tables[0]
                assert isinstance(table, LocalTable)
                found = {n: table.columns[renames[n] if renames is not None else n] for n in names}
                columns = (
                    found
                    if index is None
                    else {n: c.take(index, copy=False) for n, c in found.items()}
                )
            else:
                columns = {n: view.read(n) for n in names}
            return ([self._columns(columns, view.rows)], None, None, None)
        wanted = frozenset(renames.values()) if renames is not None else only
        sent = [self._table(t, wanted) for t in tables]
        if (
            renames is not None
            and all(t[0] == "s" for t in sent)
            and all(k == v for k, v in renames.items())
        ):
            renames = None  # these tables have nothing else any more
        return (
            sent,
            _encode_index(index),
            renames,
            tuple(sorted(only)) if only is not None else None,
        )

    def _columns(self, columns: Mapping[str, Column], rows: int) -> tuple:
        metas, lengths, blocks = _pack(columns, self.store)
        return ("s", rows, metas, lengths, [self._block(b) for b in blocks])

    def _table(self, table: Table, wanted: frozenset[str] | None) -> tuple:
        if isinstance(table, StoredTable):
            metas = {n: m for n, m in table.metas.items() if wanted is None or n in wanted}
            used = {(block, place) for _, _, _, block, place in metas.values()}
            blocks = [self._used(b, at, used) for at, b in enumerate(table.blocks)]
            return ("s", table.rows, metas, table.lengths, blocks)
        if isinstance(table, LocalTable):
            return self._columns(
                {n: c for n, c in table.columns.items() if wanted is None or n in wanted},
                table.rows,
            )
        assert isinstance(table, PromisedTable)
        if table.reply is not None:
            if table.reply not in self.replies:
                self.replies.append(table.reply)
            return ("p", self.replies.index(table.reply), table.known_rows, table.known_names)
        batch = table.batch() if wanted is None else table.batch().select(sorted(wanted))
        if self._depth == MAX_NESTED:
            return self._columns({n: batch[n] for n in batch.names}, batch.rows)
        self._depth += 1
        nested = self.batch(batch)
        self._depth -= 1
        return ("n", nested)

    def _used(self, block: Block, at: int, used: set[tuple[int, int]]) -> Block:
        if isinstance(block, list):
            return [column if (at, place) in used else None for place, column in enumerate(block)]
        return self._block(block) if any(b == at for b, _ in used) else []

    def _block(self, block: Block) -> Block:
        """A list as it is, or the place of a handle among this message's handles."""
        if isinstance(block, list):
            return block
        if block not in self.handles:
            self.handles.append(block)
        return self.handles.index(block)


class Decoder(pickle.Unpickler):
    """The inverse of `Encoder`, where the message arrived. `resolve(i)` gives the batch of reply i."""

    def __init__(
        self,
        blob: bytes,
        handles: Sequence[Any],
        store: Store,
        resolve: Callable[[int], Batch] | None = None,
    ):
        super().__init__(io.BytesIO(blob))
        self.handles, self.store, self.resolve = handles, store, resolve

    def persistent_load(self, pid: Any) -> Any:
        if isinstance(pid, int):
            return Stored(self.handles[pid])
        return self._batch(pickle.loads(pid)) if isinstance(pid, bytes) else Metrics(*pid)

    def _batch(self, wire: tuple) -> Batch:
        views, metrics = wire
        batch = Batch.of_views(
            View(
                tuple(self._table(t) for t in tables),
                _decode_index(index),
                renames,
                frozenset(only) if only is not None else None,
            )
            for tables, index, renames, only in views
        )
        if metrics is not None:
            batch._metrics = Metrics(*metrics)
        return batch

    def _table(self, wire: tuple) -> Table:
        if wire[0] == "s":
            _, rows, metas, lengths, blocks = wire
            held = [b if isinstance(b, list) else self.handles[b] for b in blocks]
            return StoredTable(rows, metas, lengths, held, self.store)
        if wire[0] == "p":
            _, at, rows, names = wire
            assert self.resolve is not None
            return PromisedTable(partial(self.resolve, at), rows, names)
        batch = self._batch(wire[1])
        names = None if any(v.known_names() is None for v in batch.views) else batch.names
        return PromisedTable(lambda: batch, batch.known_rows, names)
