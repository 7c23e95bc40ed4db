"""Batches and values as messages: small columns inside, larger ones in the runtime's store.

A message is one pickled blob, with two lists beside it: `handles` (objects in the store, fetched
when a column is read) and `replies` (results of other calls, which the runtime delivers before the
call starts). Names, lengths and indexes travel in the blob; so do the columns of a table that has
at most `INLINE_BYTES`.

Inside the blob a batch is (views, metrics), a view is (tables, index, renames, only), a table is

    ("s", rows, metas, lengths, blocks)    columns in blocks: a StoredTable
    ("p", number, rows, names)             the result of reply `number`: a PromisedTable
    ("n", batch)                           a batch inside a batch
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import chain
from types import FunctionType
from typing import Any

import attrs
import cloudpickle
import numpy as np
import torch

from hybridflow.core.contracts.runtime import Store
from hybridflow.core.names import find_spec
from hybridflow.core.values.batch import Batch, LocalTable, PromisedTable, Table, View
from hybridflow.core.values.columns import Column, Index, _positions
from hybridflow.core.values.metrics import Metrics

INLINE_BYTES = 4096
"""The columns of a table that together have at most this many bytes travel inside the message.

An object in the store costs about 1 ms.
"""
OWN_OBJECT_BYTES = 1 << 20
"""Columns from this size on get an object each; the smaller ones of a message share one."""
MAX_NESTED = 4
"""Batches of batches deeper than this are sent as new columns.

They arise where the rows of several joined results are concatenated.
"""

_NAMES = (
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "bool",
    "complex64",
    "complex128",
    "float8_e4m3fn",
    "float8_e5m2",
    "uint16",
    "uint32",
    "uint64",
)
_TORCH = {name: getattr(torch, name) for name in _NAMES}
_BITS = {"bfloat16": torch.int16, "float8_e4m3fn": torch.uint8, "float8_e5m2": torch.uint8}
"""dtypes that numpy does not have travel as the integers of their bits."""
_NUMPY = {
    name: torch.empty(0, dtype=_BITS.get(name, dtype)).numpy().dtype
    for name, dtype in _TORCH.items()
}

Block = list | Any
"""Columns in one object: a list of (shape, bytes) in the message, or a handle of the store."""


@attrs.frozen(eq=False)
class Stored:
    """A handle of the store as a value in a message.

    It travels beside the blob, so that the runtime keeps the object alive.
    """

    handle: Any


def _to_numpy(tensor: torch.Tensor) -> tuple[str, np.ndarray]:
    """Return (the dtype's name, the values in host memory, as bits where numpy lacks the dtype).

    Raises TypeError for a dtype that cannot be sent.
    """
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in _TORCH:
        raise TypeError(
            f"columns of dtype {tensor.dtype} cannot be sent; known are {', '.join(_TORCH)}"
        )
    # numpy knows no lazy conjugates and negations.
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return name, (tensor.view(_BITS[name]) if name in _BITS else tensor).numpy()


def _to_torch(dtype: str, array: np.ndarray, index: Index | None) -> torch.Tensor:
    """Return the indexed rows as a tensor with memory of its own.

    A view of the store could be written to, and would change what others read.
    """
    if isinstance(index, np.ndarray):
        own = array[index]  # numpy copies here
    else:
        own = np.array(array if index is None else array[index], copy=True, order="C")
    tensor = torch.from_numpy(own)
    return tensor.view(_TORCH[dtype]) if dtype in _BITS else tensor


def _pack_ints(array: np.ndarray) -> tuple[str, bytes]:
    """Return non-negative integers in the smallest dtype that holds them: (dtype, bytes)."""
    smallest = np.min_scalar_type(int(array.max())) if len(array) else np.uint8
    packed = array.astype(smallest)
    return packed.dtype.str, packed.tobytes()


def _unpack_ints(dtype: str, data: bytes) -> np.ndarray:
    return np.frombuffer(data, dtype).astype(np.int64)


def _runs(array: np.ndarray) -> tuple[np.ndarray, int]:
    """Return (values, repeats), to send an index of `Batch.repeat` as one entry per run."""
    # Every run must be as long as the first.
    if len(array) > 1 and array[0] == array[1]:
        changes = np.flatnonzero(np.diff(array))
        times = int(changes[0]) + 1 if len(changes) else len(array)
        values = array[::times]
        if len(array) % times == 0 and (array.reshape(-1, times) == values[:, None]).all():
            return values, times
    return array, 1


def _encode_index(index: Index | None) -> Any:
    """Return None for None, (start, stop) for a slice, else (dtype, bytes, repeats)."""
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
    dtype, data, times = wire
    values = _unpack_ints(dtype, data)
    return np.repeat(values, times) if times > 1 else values


@attrs.frozen(eq=False)
class StoredTable(Table):
    """Columns in blocks, which are fetched when they are read."""

    _rows: int
    metas: dict[str, tuple]
    """name -> (kind, dtype, number of its lengths or -1, block, index in the block)."""
    lengths: list[tuple[str, bytes]]
    """The row lengths of token columns, as `_pack_ints` packs them."""
    blocks: list[Block]
    store: Store

    @property
    def rows(self) -> int:
        return self._rows

    def names(self) -> tuple[str, ...]:
        return tuple(self.metas)

    def read(self, name: str, index: Index | None) -> Column:
        """Fetch the column's block, and copy the indexed rows out of it."""
        kind, dtype, lengths_number, block_number, place = self.metas[name]
        block = self.blocks[block_number]
        if isinstance(block, list):
            shape, data = block[place]
            array = np.frombuffer(data, _NUMPY.get(dtype, np.dtype(np.uint8))).reshape(shape)
        else:
            array = self.store.get(block)[place]

        if kind == "object":
            column = Column(pickle.loads(array.data))
            return column if index is None else column.take(index)
        if kind == "row":
            return Column(_to_torch(dtype, array, index))

        # A token column has one run of entries per row; take the runs of the indexed rows.
        lengths = _unpack_ints(*self.lengths[lengths_number])
        if index is None:
            return Column(_to_torch(dtype, array, None), lengths)
        ends = np.cumsum(lengths)
        taken = lengths[index]
        if isinstance(index, slice):
            first = int(ends[index.start - 1]) if index.start else 0
            entries: Index = slice(first, first + int(taken.sum()))
        else:
            entries = _positions(ends[index] - taken, taken)
        return Column(_to_torch(dtype, array, entries), taken)


def _pack(
    columns: Mapping[str, Column], store: Store
) -> tuple[dict, list[tuple[str, bytes]], list[Block]]:
    """Return (metas, lengths, blocks) of a StoredTable; large columns are put into the store."""
    metas: dict[str, tuple] = {}
    lengths: dict[tuple[str, bytes], int] = {}  # columns of equal lengths share them
    arrays = []
    for name, column in columns.items():
        lengths_number = -1
        if column.lengths is not None:
            lengths_number = lengths.setdefault(_pack_ints(column.lengths), len(lengths))

        dtype = ""
        if isinstance(column.values, list):
            array = np.frombuffer(cloudpickle.dumps(column.values), dtype=np.uint8)
        else:
            dtype, array = _to_numpy(column.values)
        metas[name] = (column.kind, dtype, lengths_number)
        arrays.append(array)

    # All of them inside the message, as block 0.
    placed = {}
    if sum(array.nbytes for array in arrays) <= INLINE_BYTES:
        for place, (name, meta) in enumerate(metas.items()):
            placed[name] = (*meta, 0, place)
        inline = [(array.shape, array.tobytes()) for array in arrays]
        return placed, list(lengths), [inline]

    # Small ones share an object, which is block 0; each large one has an object of its own.
    small = [array for array in arrays if array.nbytes < OWN_OBJECT_BYTES]
    blocks: list[Block] = [store.put(small) if small else []]
    place = 0
    for (name, meta), array in zip(metas.items(), arrays, strict=True):
        if array.nbytes < OWN_OBJECT_BYTES:
            placed[name] = (*meta, 0, place)
            place += 1
        else:
            placed[name] = (*meta, len(blocks), 0)
            blocks.append(store.put([array]))
    return placed, list(lengths), blocks


@lru_cache(None)
def _workers_can_import(module: str) -> bool:
    """Return whether importing the module by its name gives the same file.

    That is not always so for test modules and scripts.
    """
    loaded = sys.modules.get(module)
    if loaded is None or getattr(loaded, "__file__", None) is None:
        return True  # built in, or gone: cloudpickle decides

    path = None
    if "." in module:
        parent = sys.modules.get(module.rpartition(".")[0])
        path = getattr(parent, "__path__", None)  # where the finders look for a submodule
        if path is None or not _workers_can_import(module.rpartition(".")[0]):
            return False

    spec = find_spec(module, path)
    if spec is None:
        return False
    return spec.origin in (getattr(loaded.__spec__, "origin", None), loaded.__file__)


def _metric_parts(metrics: Metrics) -> tuple:
    """Return the arguments from which these metrics can be constructed."""
    return (metrics.means, metrics.maxima, metrics.spreads, metrics.recorded)


class _Pickler(cloudpickle.Pickler):
    """A pickler that passes batches to its encoder.

    Objects that a worker cannot import (a class of a script, a notebook or a test) are sent by
    value.
    """

    def __init__(self, stream: io.BytesIO, encoder: Encoder):
        super().__init__(stream, protocol=5)
        self.encoder = encoder

    def persistent_id(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is Batch:  # as bytes: the pickler asks this method about every object it sees
            return pickle.dumps(self.encoder.batch(obj), protocol=5)
        if kind is Metrics:
            return _metric_parts(obj)
        if kind is Stored:  # as a number: the decoder tells the three by their types
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


def _resolved_views(view: View) -> list[View]:
    """Return a view's own views if it is of a fulfilled promise, recursively; else the view.

    Otherwise the encoding of batches that calls return unchanged would grow with each call.
    """
    if len(view.tables) > 1:
        tables = tuple(chain.from_iterable(map(_resolved_tables, view.tables)))
        return [View(tables, view.index, view.renames, view.only)]

    table = view.tables[0]
    if not isinstance(table, PromisedTable) or table.reply is not None:
        return [view]

    # The columns that the view has of the promised batch, by that batch's own views.
    inner = table.batch()
    if view.renames is None:
        views = inner.views if view.only is None else inner.select(sorted(view.only)).views
    else:
        names_of: dict[View, dict[str, str]] = {}
        for new, old in view.renames.items():
            names_of.setdefault(inner._home(old), {})[new] = old
        views = [home.rename(names) for home, names in names_of.items()]
    views = views or [View((LocalTable({}, inner.rows),))]

    # They may be views of fulfilled promises too.
    taken = (inner_view.take(view.index) for inner_view in views)
    return list(chain.from_iterable(map(_resolved_views, taken)))


def _resolved_tables(table: Table) -> tuple[Table, ...]:
    """Return the tables of a fulfilled promise whose batch is plain tables; else the table."""
    if isinstance(table, PromisedTable) and table.reply is None and len(table.batch().views) == 1:
        view = table.batch().views[0]
        if view.index is None and view.renames is None and view.only is None:
            return tuple(chain.from_iterable(map(_resolved_tables, view.tables)))
    return (table,)


class Encoder:
    """Turns values that may hold batches, anywhere inside, into (blob, handles, replies)."""

    def __init__(self, store: Store):
        self.store = store
        self.handles: list[Any] = []
        self.replies: list[Any] = []
        self._numbers: dict[Any, int] = {}
        """The index of each handle in `handles`, and of each reply in `replies`."""
        self._depth = 0

    def dumps(self, value: Any) -> bytes:
        """Return the blob of a value; its handles and replies are added to the lists."""
        stream = io.BytesIO()
        _Pickler(stream, self).dump(value)
        return stream.getvalue()

    def batch(self, batch: Batch) -> tuple:
        """Return (views, metrics) of a batch, as plain values."""
        views = []
        for view in batch.views:
            views += [self._view(resolved.narrow()) for resolved in _resolved_views(view.narrow())]
        metrics = batch._metrics
        return (views, _metric_parts(metrics) if metrics else None)

    def _view(self, view: View) -> tuple:
        tables = view.tables
        renames = view.renames
        only = view.only

        # Columns in this process's memory: just the rows and names of the view.
        if all(isinstance(table, LocalTable) for table in tables) and (
            len(tables) == 1 or view.index is not None
        ):
            return ([self._columns(_local_columns(view), view.rows)], None, None, None)

        # Elsewhere: the tables by reference, with the columns that the view names.
        wanted = frozenset(renames.values()) if renames is not None else only
        sent = [self._table(table, wanted) for table in tables]
        if (
            renames is not None
            and all(table[0] == "s" for table in sent)
            and all(new == old for new, old in renames.items())
        ):
            renames = None  # these tables have no other columns any more
        names = tuple(sorted(only)) if only is not None else None
        return (sent, _encode_index(view.index), renames, names)

    def _columns(self, columns: Mapping[str, Column], rows: int) -> tuple:
        metas, lengths, blocks = _pack(columns, self.store)
        return ("s", rows, metas, lengths, [self._block(block) for block in blocks])

    def _table(self, table: Table, wanted: frozenset[str] | None) -> tuple:
        """Return the table in plain values (see the module's docstring).

        wanted: the names of the columns to send; None for all.
        """
        # Columns that are in blocks already: just those blocks that are used.
        if isinstance(table, StoredTable):
            metas = {
                name: meta for name, meta in table.metas.items() if wanted is None or name in wanted
            }
            used = {(block, place) for *_, block, place in metas.values()}
            blocks = [self._used(block, number, used) for number, block in enumerate(table.blocks)]
            return ("s", table.rows, metas, table.lengths, blocks)

        if isinstance(table, LocalTable):
            columns = {
                name: column
                for name, column in table.columns.items()
                if wanted is None or name in wanted
            }
            return self._columns(columns, table.rows)

        # A promise: by its reply, or else by the batch that it became.
        assert isinstance(table, PromisedTable)
        if table.reply is not None:
            number = self._number(table.reply, self.replies)
            return ("p", number, table.known_rows, table.known_names)
        batch = table.batch() if wanted is None else table.batch().select(sorted(wanted))
        if self._depth == MAX_NESTED:  # read here, so that blobs do not grow without bound
            return self._columns({name: batch[name] for name in batch.names}, batch.rows)
        self._depth += 1
        nested = self.batch(batch)
        self._depth -= 1
        return ("n", nested)

    def _used(self, block: Block, number: int, used: set[tuple[int, int]]) -> Block:
        """Return the block with only the columns in `used`, a set of (block, index)."""
        if isinstance(block, list):
            return [
                column if (number, place) in used else None for place, column in enumerate(block)
            ]
        return self._block(block) if any(number == other for other, _ in used) else []

    def _block(self, block: Block) -> Block:
        """Return an inline block unchanged, or the index of a handle in this message's handles."""
        if isinstance(block, list):
            return block
        return self._number(block, self.handles)

    def _number(self, item: Any, items: list[Any]) -> int:
        """Return the index of a handle or reply in its list; it is appended if it is new."""
        if item not in self._numbers:
            self._numbers[item] = len(items)
            items.append(item)
        return self._numbers[item]


def _local_columns(view: View) -> dict[str, Column]:
    """Return the columns of a view of LocalTables; a single table's share its memory."""
    if len(view.tables) > 1:
        return {name: view.read(name) for name in view.names()}

    table = view.tables[0]
    assert isinstance(table, LocalTable)
    renames = view.renames
    columns = {}
    for name in view.names():
        column = table.columns[renames[name] if renames is not None else name]
        columns[name] = column if view.index is None else column.take(view.index, copy=False)
    return columns


class Decoder(pickle.Unpickler):
    """The inverse of `Encoder`, for the receiver of a message.

    `resolve(i)` returns the batch of reply i.
    """

    def __init__(
        self,
        blob: bytes,
        handles: Sequence[Any],
        store: Store,
        resolve: Callable[[int], Batch] | None = None,
    ):
        super().__init__(io.BytesIO(blob))
        self.handles = handles
        self.store = store
        self.resolve = resolve

    def persistent_load(self, pid: Any) -> Any:
        if isinstance(pid, int):
            return Stored(self.handles[pid])
        return self._batch(pickle.loads(pid)) if isinstance(pid, bytes) else Metrics(*pid)

    def _batch(self, wire: tuple) -> Batch:
        views, metrics = wire
        batch = Batch.of_views(
            View(
                tuple(map(self._table, tables)),
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
            _, rows, metas, lengths, sent = wire
            blocks = [block if isinstance(block, list) else self.handles[block] for block in sent]
            return StoredTable(rows, metas, lengths, blocks, self.store)

        if wire[0] == "p":
            _, number, rows, names = wire
            assert self.resolve is not None
            return PromisedTable(partial(self.resolve, number), rows, names)

        # Names that an inner promise does not know yet stay unknown.
        batch = self._batch(wire[1])
        names = None if any(view.known_names() is None for view in batch.views) else batch.names
        return PromisedTable(lambda: batch, batch.known_rows, names)
