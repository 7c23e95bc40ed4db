"""The batch: columns by name, one row per sequence, local or by reference.

    Batch     columns side by side: views, of which a later one hides equal names of earlier ones
    View      concatenated tables, with an index of rows and a selection of names
    Table     rows and columns: in this process (LocalTable), or the future result of a call
              (PromisedTable)

Joining, splitting, taking, repeating and renaming only make new views: no data moves. Reading a
column (`batch["scores"]`) fetches the rows that the batch has of it, and keeps them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any

import attrs
import numpy as np

from hybridflow.core.errors import HybridFlowError
from hybridflow.core.values.columns import Column, Index, as_column, compose, index_rows
from hybridflow.core.values.metrics import Metrics


class Table(ABC):
    """Rows and named columns, here or elsewhere."""

    @property
    @abstractmethod
    def rows(self) -> int:
        """The number of rows; may wait for the result that the table stands for."""

    @property
    def known_rows(self) -> int | None:
        """The number of rows, if it is known without waiting."""
        return self.rows

    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """Return the names of the columns; may wait."""

    @property
    def known_names(self) -> tuple[str, ...] | None:
        """The names of the columns, if they are known without waiting."""
        return self.names()

    @abstractmethod
    def read(self, name: str, index: Index | None) -> Column:
        """Return rows of a column; may wait."""


class LocalTable(Table):
    """Columns in this process's memory. `rows` is the row count, also without any column."""

    def __init__(self, columns: Mapping[str, Column], rows: int = 0):
        self.columns = dict(columns)
        counts = {name: column.rows for name, column in self.columns.items()}
        if len(set(counts.values())) > 1:
            raise ValueError(f"the columns of a batch must have one row count, got {counts}")
        self._rows = next(iter(counts.values()), rows)

    @property
    def rows(self) -> int:
        return self._rows

    def names(self) -> tuple[str, ...]:
        return tuple(self.columns)

    def read(self, name: str, index: Index | None) -> Column:
        return self.columns[name] if index is None else self.columns[name].take(index)


@attrs.define(eq=False)
class PromisedTable(Table):
    """The batch that a call will return. Its row count and names may be known before it does.

    Raises HybridFlowError when the returned batch has another row count, or lacks a promised
    column.
    """

    _resolve: Callable[[], Batch]
    known: int | None
    """The row count that was promised, or is known meanwhile; None: it is not known."""
    _names: tuple[str, ...] | None
    reply: Any = None
    """The reply that the wire sends instead of the table."""
    _batch: Batch | None = None

    def batch(self) -> Batch:
        """Wait for the batch, and check it against the promise."""
        if self._batch is None:
            # Other code has relied on the promise already, so a mismatch is an error.
            batch = self._resolve()
            if self.known is not None and batch.views and batch.rows != self.known:
                raise HybridFlowError(
                    f"a call that keeps the rows of its input returned {batch.rows} rows for "
                    f"{self.known}; register the method with same_rows=False"
                )
            if self._names is not None and (missing := set(self._names) - set(batch.names)):
                raise HybridFlowError(
                    "a call did not return the columns that it promised: "
                    f"{', '.join(sorted(missing))}"
                )
            self._batch = batch
        return self._batch

    @property
    def rows(self) -> int:
        if self.known is None:
            self.known = self.batch().rows
        return self.known

    @property
    def known_rows(self) -> int | None:
        return self.known

    def names(self) -> tuple[str, ...]:
        return self._names if self._names is not None else self.batch().names

    @property
    def known_names(self) -> tuple[str, ...] | None:
        if self._names is None and self._batch is not None and self._batch._knows_names():
            return self._batch.names
        return self._names

    def read(self, name: str, index: Index | None) -> Column:
        return self.batch().read(name, index)


@attrs.frozen(eq=False)
class View:
    """Concatenated tables, with an index of rows and a selection of names.

    index: the rows, numbered over all tables; None: all.
    renames: the view's name -> the tables' own name; None: all names, unchanged.
    only: the names to select from tables whose names are not known yet; None: all.
    """

    tables: tuple[Table, ...]
    index: Index | None = None
    renames: dict[str, str] | None = None
    only: frozenset[str] | None = None

    # --- contents ---

    @property
    def known_rows(self) -> int | None:
        """The number of rows, if it is known without waiting."""
        # An array has one entry per row; a slice needs the tables' row counts.
        if isinstance(self.index, np.ndarray):
            return len(self.index)

        total = 0
        for table in self.tables:
            if (rows := table.known_rows) is None:
                return None
            total += rows
        return index_rows(self.index, total)

    @property
    def rows(self) -> int:
        """The number of rows; may wait."""
        if isinstance(self.index, np.ndarray):
            return len(self.index)
        return index_rows(self.index, sum(table.rows for table in self.tables))

    def known_names(self) -> tuple[str, ...] | None:
        """Return the view's names, if they are known without waiting."""
        if self.renames is not None:
            return tuple(self.renames)

        # The tables of a view have the same columns, so one that knows its names is enough.
        for table in self.tables:
            if (names := table.known_names) is not None:
                return self._seen(names)
        return None

    def names(self) -> tuple[str, ...]:
        """Return the view's names; may wait."""
        known = self.known_names()
        return known if known is not None else self._seen(self.tables[0].names())

    def _seen(self, names: tuple[str, ...]) -> tuple[str, ...]:
        if self.only is None:
            return names
        return tuple(name for name in names if name in self.only)

    def may_have(self, name: str) -> bool:
        """Return whether it has the column, or may have it as names are not known; never waits."""
        known = self.known_names()
        if known is None:
            return self.only is None or name in self.only
        return name in known

    # --- derived views ---

    def take(self, index: Index | None, cache: dict[int, Index | None] | None = None) -> View:
        """Return a view of some rows; None takes all.

        The views of a batch often share one index object. With one `cache`, passed to all of them
        with the same `index`, they share the composed one too: id() of the old index -> the new.
        """
        if index is None:
            return self
        old_id = id(self.index)
        if cache is not None and old_id in cache and self.index is not None:
            return View(self.tables, cache[old_id], self.renames, self.only)

        rows = self.index.stop if isinstance(self.index, slice) else 0
        composed = compose(self.index, index, rows)
        if cache is not None:
            cache[old_id] = composed
        return View(self.tables, composed, self.renames, self.only)

    def rename(self, names: Mapping[str, str]) -> View:
        """Return a view with other names: new -> present; all other columns are dropped."""
        if self.renames is not None:
            names = {new: self.renames[present] for new, present in names.items()}
        return View(self.tables, self.index, dict(names))

    def select(self, wanted: Sequence[str]) -> View | None:
        """Return a view of only the wanted columns; None when it has none of them."""
        # Names that are not known yet are filtered once they are.
        known = self.known_names()
        if known is None:
            only = frozenset(wanted) if self.only is None else self.only & frozenset(wanted)
            return View(self.tables, self.index, None, only) if only else None
        names = [name for name in wanted if name in known]
        return self.rename({name: name for name in names}) if names else None

    def narrow(self) -> View:
        """Return a view of the same rows with only those tables that the index touches.

        It is the view itself while the tables' row counts are not known.
        """
        if self.index is None or (bounds := self._bounds()) is None:
            return self
        return self._narrowed(self.index, bounds)

    def cut(self, ends: Sequence[int], caches: Sequence[dict[int, Index | None]]) -> list[View]:
        """Return a view of the rows from each entry of `ends` to the next.

        Each has only the tables of its rows (see `narrow`), in time that does not grow with the
        number of tables. `caches`: one for each view, see `take`.
        """
        bounds = self._bounds()
        views = []
        for (start, stop), cache in zip(pairwise(ends), caches, strict=True):
            part = slice(start, stop, 1)
            if bounds is None:
                views.append(self.take(part, cache))
            else:
                rows = part if self.index is None else compose(self.index, part, int(bounds[-1]))
                assert rows is not None
                views.append(self._narrowed(rows, bounds))
        return views

    def _bounds(self) -> np.ndarray | None:
        """Return the first row of each table, and the number of all rows, int64 [tables + 1].

        None where nothing can be narrowed: for one table, or with unknown row counts.
        """
        if len(self.tables) < 2:
            return None
        counts = [table.known_rows for table in self.tables]
        return None if None in counts else np.cumsum([0, *counts])

    def _narrowed(self, index: Index, bounds: np.ndarray) -> View:
        """Return a view of rows `index`, with only the tables that have any of these rows."""
        if isinstance(index, slice):
            start, stop, step = index.indices(int(bounds[-1]))
            if step == 1:
                return self._between(start, stop, bounds)
            index = np.arange(start, stop, step)
        if len(index) == 0:
            return self._between(0, 0, bounds)

        # owner: the table of each row, among those that own any; rows are numbered anew over them.
        table_of = np.searchsorted(bounds, index, side="right") - 1
        touched, owner = np.unique(table_of, return_inverse=True)
        if len(touched) == len(self.tables):
            return View(self.tables, index, self.renames, self.only)
        sizes = bounds[touched + 1] - bounds[touched]
        first = np.cumsum(sizes) - sizes
        tables = tuple(self.tables[table] for table in touched)
        rows = index - bounds[table_of] + first[owner]
        return View(tables, rows, self.renames, self.only)

    def _between(self, start: int, stop: int, bounds: np.ndarray) -> View:
        """Return a view of the rows start to stop."""
        # One table is kept in any case, since it has the names.
        if start >= stop:
            return View(self.tables[:1], slice(0, 0), self.renames, self.only)
        first = int(np.searchsorted(bounds, start, side="right")) - 1
        last = int(np.searchsorted(bounds, stop, side="left"))
        tables = tuple(
            table
            for table, count in zip(
                self.tables[first:last], np.diff(bounds[first : last + 1]), strict=True
            )
            if count
        )
        complete = start == bounds[first] and stop == bounds[last]
        offset = int(bounds[first])
        rows = None if complete else slice(start - offset, stop - offset)
        return View(tables, rows, self.renames, self.only)

    def read(self, name: str) -> Column:
        """Return a column; waits for what it needs."""
        if isinstance(self.index, slice) and len(self.tables) > 1:
            for table in self.tables:
                _ = table.rows  # waits where it must, so that narrow knows the row counts

        # Tables of which no row is taken are not read.
        view = self.narrow()
        name = name if view.renames is None else view.renames[name]
        if len(view.tables) == 1:
            return view.tables[0].read(name, view.index)
        if view.index is None:
            return Column.concat([table.read(name, None) for table in view.tables])

        # Rows of several tables, in any order
        if isinstance(view.index, slice):
            total = sum(table.rows for table in view.tables)
            return _gather(view.tables, name, np.arange(total)[view.index])
        return _gather(view.tables, name, np.asarray(view.index))


def _gather(tables: Sequence[Table], name: str, wanted: np.ndarray) -> Column:
    """Return rows `wanted` (numbered over all tables) in that order, with one read per table."""
    if len(wanted) == 0:
        return tables[0].read(name, slice(0, 0))
    bounds = np.cumsum([0, *(table.rows for table in tables)])
    owner = np.searchsorted(bounds, wanted, side="right") - 1

    # places: the positions of each table's rows in the result, table by table.
    places = np.argsort(owner, kind="stable")
    touched, counts = np.unique(owner, return_counts=True)
    parts = [
        tables[table].read(name, wanted[place] - bounds[table])
        for table, place in zip(touched, np.split(places, np.cumsum(counts)[:-1]), strict=True)
    ]

    # The parts are in the order of the tables; put their rows into the wanted order.
    return Column.concat(parts).take(np.argsort(places, kind="stable"))


class Batch:
    """Columns by name, one row per sequence.

    `Batch({"scores": tensor, "response_ids": tokens([...]), "meta": [obj, ...]})`. A column has a
    value per row (a tensor [rows, *trailing]), a run of values per row (`tokens(...)`: ragged, no
    padding) or an object per row (a list). Columns that are not read are not fetched. Of two
    columns with one name, the one joined later counts.
    """

    __slots__ = ("_cuts", "_metrics", "_read", "views")

    def __init__(self, columns: Mapping[str, Any] | None = None, metrics: Metrics | None = None):
        self.views: list[View] = []
        if columns:
            table = LocalTable({name: as_column(value) for name, value in columns.items()})
            self.views.append(View((table,)))
        self._metrics = metrics
        self._read: dict[str, Column] = {}  # columns that were read
        self._cuts: np.ndarray | None = None  # rows between which `split` may cut; None: all

    @classmethod
    def of_views(cls, views: Iterable[View]) -> Batch:
        """Make a batch of views, which must have the same number of rows."""
        batch = cls()
        batch.views = list(views)
        return batch

    # --- contents: "known" properties never wait for a call, the others may ---

    @property
    def rows(self) -> int:
        """The number of rows; waits for a pending call only if no view knows it."""
        known = self.known_rows
        return self.views[0].rows if known is None else known

    @property
    def known_rows(self) -> int | None:
        """The number of rows, if it is known without waiting."""
        # Views have equally many rows, so one that knows its number is enough.
        if not self.views:
            return 0
        for view in self.views:
            if (rows := view.known_rows) is not None:
                return rows
        return None

    def __len__(self) -> int:
        return self.rows

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all columns; may wait."""
        return tuple(dict.fromkeys(chain.from_iterable(view.names() for view in self.views)))

    def __contains__(self, name: str) -> bool:
        return self._view_of(name) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def _view_of(self, name: str) -> View | None:
        """Return the last view with a column of this name; None if there is none."""
        undecided: list[View] = []
        view = None
        for candidate in reversed(self.views):
            if not candidate.may_have(name):
                continue
            if candidate.known_names() is not None:
                view = candidate
                break
            undecided.append(candidate)

        # A later view whose names are not known yet may hide it; only then must we wait.
        return next((later for later in undecided if name in later.names()), view)

    def _home(self, name: str) -> View:
        """Return the last view with this column. Raises KeyError with all names."""
        view = self._view_of(name)
        if view is None:
            raise KeyError(
                f"the batch has no column {name!r}; it has {', '.join(self.names) or 'none'}"
            )
        return view

    def __getitem__(self, name: str) -> Column:
        """Return a column, which is fetched if it is in another process.

        Raises KeyError with all names.
        """
        if name not in self._read:
            column = self._home(name).read(name)

            # `join` could not compare row counts that were not known yet.
            expected = self.known_rows
            if expected is not None and column.rows != expected:
                raise ValueError(f"column {name!r} has {column.rows} rows in a batch of {expected}")
            self._read[name] = column
        return self._read[name]

    def read(self, name: str, index: Index | None) -> Column:
        """Return some rows of a column, for another batch; they are not cached in this one."""
        return self._home(name).take(index).read(name)

    @property
    def metrics(self) -> Metrics:
        """The metrics that came with this result (waits for it)."""
        if self._metrics is not None:
            return self._metrics
        tables = dict.fromkeys(chain.from_iterable(view.tables for view in self.views))
        return Metrics.merge(
            table.batch().metrics for table in tables if isinstance(table, PromisedTable)
        )

    # --- derived batches; no data is moved ---

    def select(self, names: Iterable[str]) -> Batch:
        """Return a batch of only these columns.

        A missing one is an error when it is read, since a pending result may bring it.
        """
        wanted = list(dict.fromkeys(names))
        views = [part for view in self.views if (part := view.select(wanted)) is not None]

        # Without a column left, the batch still has its number of rows.
        if self.views and not views:
            rows = self.known_rows
            if rows is None:
                views = [self.views[0].rename({})]
            else:
                views = [View((LocalTable({}, rows),))]

        read = {name: column for name, column in self._read.items() if name in wanted}
        return self._same_rows(views, read)

    def _same_rows(self, views: Iterable[View], read: dict[str, Column]) -> Batch:
        """Make a batch of other columns with this one's rows, cuts and metrics."""
        batch = Batch.of_views(views)
        batch._cuts = self._cuts
        batch._metrics = self._metrics
        batch._read = read
        return batch

    def drop(self, names: Iterable[str]) -> Batch:
        """Return a batch without these columns."""
        dropped = set(names)
        return self.select([name for name in self.names if name not in dropped])

    def rename(self, **names: str) -> Batch:
        """`rename(logprobs="old_logprobs")` gives the column `logprobs` the name `old_logprobs`.

        Raises KeyError for a column that does not exist, ValueError for a name that is taken.
        """
        # Checked before anything is renamed: every old name exists, every new one is free.
        present = self.names
        for name in names:
            self._home(name)  # raises KeyError where there is none
        renamed = [names.get(name, name) for name in present]
        if taken := [name for name in names.values() if renamed.count(name) > 1]:
            raise ValueError(f"the batch has a column {taken[0]!r} already; drop it first")

        views = []
        for view in self.views:
            present_names = {names.get(name, name): name for name in view.names()}
            views.append(view.rename(present_names))
        read = {names.get(name, name): column for name, column in self._read.items()}
        return self._same_rows(views, read)

    def join(self, *others: Batch) -> Batch:
        """Return the columns of all, side by side.

        Raises ValueError where known row counts differ.
        """
        # Row counts that are not known yet are checked when a column is read.
        batches = [batch for batch in (self, *others) if batch.views]
        counts = [batch.known_rows for batch in batches]
        if len({count for count in counts if count is not None}) > 1:
            raise ValueError(f"only batches with one row count can be joined, got {counts} rows")

        joined = self._same_rows(chain.from_iterable(batch.views for batch in batches), {})
        joined._metrics = _own_metrics(batches)

        # Columns that were read stay so, unless a later batch hides them.
        if joined._knows_names():
            for batch in batches:
                for name in joined._read.keys() & batch.names:
                    del joined._read[name]
                joined._read |= batch._read
        return joined

    def with_columns(self, **columns: Any) -> Batch:
        """Return the batch with further columns, which replace its own of equal names."""
        return self.join(Batch(columns))

    def take(self, index: Index | Sequence[int]) -> Batch:
        """Return rows by slice, row numbers (from the end if negative) or boolean mask."""
        # A slice without a step stays one: it needs no array, and `narrow` can drop tables.
        if not isinstance(index, slice):
            index = self._row_numbers(np.asarray(index))
        elif index.step not in (None, 1):
            index = np.arange(self.rows)[index]
        else:
            start, stop, _ = index.indices(self.rows)
            index = slice(start, max(start, stop), 1)

        cache: dict[int, Index | None] = {}
        return Batch.of_views(view.take(index, cache) for view in self.views)

    def _row_numbers(self, index: np.ndarray) -> np.ndarray:
        """Return int64 row numbers, 0 <= number < rows, for entries that may count from the end.

        Raises IndexError for what is out of range.
        """
        if index.dtype == bool:
            if len(index) != self.rows:
                raise IndexError(f"a mask of {len(index)} entries for a batch of {self.rows} rows")
            index = np.flatnonzero(index)
        index = index.astype(np.int64)

        # The message names the entry that is farthest from 0.
        if len(index) and not (-self.rows <= index.min() and index.max() < self.rows):
            raise IndexError(
                f"row {int(index[np.abs(index).argmax()])} of a batch of {self.rows} rows"
            )
        return np.where(index < 0, index + self.rows, index)

    def whole(self, units: np.ndarray) -> Batch:
        """Return the rows reordered: those with equal entries of `units` [rows] are neighbours.

        `split` keeps such rows together.
        """
        units = np.asarray(units)
        if len(units) != self.rows:
            raise ValueError(
                f"whole() needs one unit number for each of the {self.rows} rows, got {len(units)}"
            )

        order = np.argsort(units, kind="stable")
        in_order = (order == np.arange(len(order))).all()
        batch = self if in_order else self.take(order)
        batch = self._same_rows(batch.views, batch._read)
        # A cut may be where the unit changes, and at both ends.
        borders = np.flatnonzero(np.diff(units[order])) + 1
        batch._cuts = np.concatenate([[0], borders, [len(order)]])
        return batch

    def split(self, parts: int) -> list[Batch]:
        """Return `parts` batches in order, some of which may be empty.

        Sizes differ by at most one row (or unit, see `whole`), and the first ones are larger.
        """
        if parts < 1:
            raise ValueError(f"a batch is split into at least one part, got {parts}")
        if parts == 1:
            return [self]

        # The first `extra` parts have size + 1 units, the others size.
        cuts = self._cuts if self._cuts is not None else range(self.rows + 1)
        size, extra = divmod(len(cuts) - 1, parts)
        units = [size * i + min(i, extra) for i in range(parts + 1)]
        ends = [int(cuts[unit]) for unit in units]
        caches: list[dict[int, Index | None]] = [{} for _ in range(parts)]
        views = [view.cut(ends, caches) for view in self.views]
        return [Batch.of_views(of_view[part] for of_view in views) for part in range(parts)]

    def repeat(self, times: int) -> Batch:
        """Return each row `times` times, copies next to each other."""
        if times == 1:
            return self
        return self.take(np.repeat(np.arange(self.rows), times))

    @classmethod
    def concat(cls, batches: Sequence[Batch]) -> Batch:
        """Return the concatenated rows of all batches.

        All must have the same columns. Raises ValueError where it is known that they do not.
        """
        batches = [batch for batch in batches if batch.views]
        if not batches:
            return cls()
        if len(batches) == 1:
            return batches[0]

        known = [frozenset(batch.names) for batch in batches if batch._knows_names()]
        if len(set(known)) > 1:
            differing = sorted(frozenset.union(*known) - frozenset.intersection(*known))
            raise ValueError(
                "batches put behind one another need the same columns; not in all of them: "
                f"{differing}"
            )

        # A plain batch gives its tables, so that chains of calls do not nest tables in tables.
        tables = tuple(chain.from_iterable(map(_tables, batches)))
        joined = cls.of_views([View(tables)])
        joined._metrics = _own_metrics(batches)
        return joined

    def _knows_names(self) -> bool:
        return all(view.known_names() is not None for view in self.views)

    def __repr__(self) -> str:
        rows = "?" if self.known_rows is None else self.known_rows
        names = chain.from_iterable(view.known_names() or ("...",) for view in self.views)
        return f"Batch({rows} rows: {', '.join(dict.fromkeys(names))})"


def _own_metrics(batches: Iterable[Batch]) -> Metrics | None:
    own = [batch._metrics for batch in batches if batch._metrics is not None]
    return Metrics.merge(own) if own else None


def _tables(batch: Batch) -> tuple[Table, ...]:
    """Return the tables of a batch that is a single plain view; else the batch as one table."""
    view = batch.views[0]
    is_plain = view.index is None and view.renames is None and view.only is None
    if is_plain and len(batch.views) == 1:
        return view.tables
    names = batch.names if batch._knows_names() else None
    return (PromisedTable(lambda: batch, batch.known_rows, names),)
