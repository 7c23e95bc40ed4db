"""The batch: columns by name, one row per sequence, local or by reference.

A batch is a list of *views*; a view is a table (or several, one behind the other), the rows taken of it and the names
seen of it. Joining, splitting, taking, repeating and renaming only make new views: no data moves. Reading a column
(`batch["scores"]`) fetches that column's needed rows from where they are, and keeps them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from hybridflow.core.errors import HybridFlowError
from hybridflow.core.values.columns import Column, Index, as_column, compose, index_rows
from hybridflow.core.values.metrics import Metrics


class Table(ABC):
    """Rows and named columns, somewhere."""

    @property
    @abstractmethod
    def rows(self) -> int:
        """May wait for the result that it stands for."""

    @property
    def known_rows(self) -> int | None:
        """The number of rows if it is known without waiting."""
        return self.rows

    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """May wait."""

    @property
    def known_names(self) -> tuple[str, ...] | None:
        return self.names()

    @abstractmethod
    def read(self, name: str, index: Index | None) -> Column: ...


class LocalTable(Table):
    """Columns in this process's memory. `rows` is needed where there is no column to tell it."""

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


class PromisedTable(Table):
    """The batch that a call will return. Row count and names may be known before it does.

    `reply` is what the wire sends in its place. Raises HybridFlowError when the batch breaks the promise.
    """

    def __init__(
        self,
        resolve: Callable[[], Batch],
        rows: int | None,
        names: tuple[str, ...] | None,
        reply: Any = None,
    ):
        self._resolve, self.known, self._names, self.reply = resolve, rows, names, reply
        self._batch: Batch | None = None

    def batch(self) -> Batch:
        if self._batch is None:
            batch = self._resolve()
            if self.known is not None and batch.views and batch.rows != self.known:
                raise HybridFlowError(
                    f"a call that keeps the rows of its input returned {batch.rows} rows for {self.known}; register "
                    "the method with same_rows=False"
                )
            if self._names is not None and (missing := set(self._names) - set(batch.names)):
                raise HybridFlowError(
                    f"a call did not return the columns that it promised: {', '.join(sorted(missing))}"
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
        return self._names

    def read(self, name: str, index: Index | None) -> Column:
        return self.batch().read(name, index)


class View:
    """Tables one behind the other, the rows taken of them (None: all), the names seen (new -> old; None: all).

    `only` filters the names of tables that do not know theirs yet.
    """

    __slots__ = ("index", "only", "renames", "tables")

    def __init__(
        self,
        tables: tuple[Table, ...],
        index: Index | None = None,
        renames: dict[str, str] | None = None,
        only: frozenset[str] | None = None,
    ):
        self.tables, self.index, self.renames, self.only = tables, index, renames, only

    @property
    def known_rows(self) -> int | None:
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
        if isinstance(self.index, np.ndarray):
            return len(self.index)
        return index_rows(self.index, sum(t.rows for t in self.tables))

    def known_names(self) -> tuple[str, ...] | None:
        if self.renames is not None:
            return tuple(self.renames)
        for table in self.tables:
            if (names := table.known_names) is not None:
                return self._seen(names)
        return None

    def names(self) -> tuple[str, ...]:
        known = self.known_names()
        return known if known is not None else self._seen(self.tables[0].names()) or ()

    def _seen(self, names: tuple[str, ...] | None) -> tuple[str, ...] | None:
        return (
            names
            if names is None or self.only is None
            else tuple(n for n in names if n in self.only)
        )

    def may_have(self, name: str) -> bool:
        """Whether it has, or may turn out to have, the column; never waits."""
        known = self.known_names()
        return name in known if known is not None else self.only is None or name in self.only

    def take(self, index: Index | None, cache: dict[int, Index | None] | None = None) -> View:
        if index is None:
            return self
        if cache is not None and id(self.index) in cache and self.index is not None:
            return View(self.tables, cache[id(self.index)], self.renames, self.only)
        composed = compose(
            self.index, index, self.index.stop if isinstance(self.index, slice) else 0
        )
        if cache is not None:
            cache[id(self.index)] = composed
        return View(self.tables, composed, self.renames, self.only)

    def rename(self, names: Mapping[str, str]) -> View:
        """`names`: new -> present; names outside are dropped."""
        old = self.renames
        return View(
            self.tables,
            self.index,
            {n: (old[p] if old is not None else p) for n, p in names.items()},
        )

    def select(self, wanted: Sequence[str]) -> View | None:
        """Only the wanted columns; None when it has none of them."""
        known = self.known_names()
        if known is None:
            only = frozenset(wanted) if self.only is None else self.only & frozenset(wanted)
            return View(self.tables, self.index, None, only) if only else None
        kept = [n for n in wanted if n in known]
        return self.rename({n: n for n in kept}) if kept else None

    def narrow(self) -> View:
        """The same rows, of only those tables that a slice touches; as it is while their row counts are not known."""
        counts = [t.known_rows for t in self.tables]
        if len(counts) < 2 or not isinstance(self.index, slice) or None in counts:
            return self
        start, stop, step = self.index.indices(sum(counts))  # type: ignore[arg-type]
        if step != 1:
            return self
        kept, total, offset, first = [], 0, 0, None
        for table, count in zip(self.tables, counts, strict=True):
            assert count is not None
            if count and offset < stop and offset + count > start:
                first = offset if first is None else first
                kept.append(table)
                total += count
            offset += count
        if first is None:
            return View(self.tables[:1], slice(0, 0), self.renames, self.only)
        whole = start == first and stop == first + total
        return View(
            tuple(kept),
            None if whole else slice(start - first, stop - first),
            self.renames,
            self.only,
        )

    def read(self, name: str) -> Column:
        if isinstance(self.index, slice) and len(self.tables) > 1:
            for table in self.tables:
                _ = table.rows  # waits where it must, for narrow to know
        view = self.narrow()
        old = name if view.renames is None else view.renames[name]
        if len(view.tables) == 1:
            return view.tables[0].read(old, view.index)
        if view.index is None:
            return Column.concat([t.read(old, None) for t in view.tables])
        total = sum(t.rows for t in view.tables)
        wanted = (
            np.arange(total)[view.index]
            if isinstance(view.index, slice)
            else np.asarray(view.index)
        )
        return _gather(view.tables, old, wanted)


def _gather(tables: Sequence[Table], name: str, wanted: np.ndarray) -> Column:
    """Rows `wanted` (numbered over all tables) in that order: each table is read once, for its own rows."""
    parts, order, offset = [], [], 0
    for table in tables:
        here = np.flatnonzero((wanted >= offset) & (wanted < offset + table.rows))
        if len(here):
            parts.append(table.read(name, wanted[here] - offset))
            order.append(here)
        offset += table.rows
    if not parts:
        return tables[0].read(name, slice(0, 0))
    back = np.argsort(np.concatenate(order), kind="stable")
    return Column.concat(parts).take(back)


class Batch:
    """Columns by name, one row per sequence.

    `Batch({"scores": tensor, "response_ids": tokens([...]), "meta": [obj, ...]})`. A column is a value per row (tensor
    [rows, *trailing]), a run of values per row (`tokens(...)`: ragged, no padding) or an object per row (list). Columns
    nobody knows travel untouched. Of two columns with one name the one joined later is seen.
    """

    __slots__ = ("_cuts", "_metrics", "_read", "views")

    def __init__(self, columns: Mapping[str, Any] | None = None, metrics: Metrics | None = None):
        self.views: list[View] = (
            [View((LocalTable({k: as_column(v) for k, v in columns.items()}),))] if columns else []
        )
        self._metrics = metrics
        self._read: dict[str, Column] = {}
        self._cuts: np.ndarray | None = None

    @classmethod
    def of_views(cls, views: Iterable[View]) -> Batch:
        batch = cls()
        batch.views = list(views)
        return batch

    # What is in it
    @property
    def rows(self) -> int:
        """The number of rows; waits for a pending call only if no view knows it."""
        known = self.known_rows
        if known is not None:
            return known
        return self.views[0].rows if self.views else 0

    @property
    def known_rows(self) -> int | None:
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
        return tuple(dict.fromkeys(name for view in self.views for name in view.names()))

    def __contains__(self, name: str) -> bool:
        return self._view_of(name) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def _view_of(self, name: str) -> View | None:
        undecided: list[View] = []
        for view in reversed(self.views):
            if not view.may_have(name):
                continue
            if view.known_names() is not None:
                # A later view whose names are not known yet may hide it; only then must we wait.
                return next((v for v in undecided if name in v.names()), view)
            undecided.append(view)
        return next((v for v in undecided if name in v.names()), None)

    def _home(self, name: str) -> View:
        """The view that has a column. Raises KeyError with the names there are."""
        view = self._view_of(name)
        if view is None:
            raise KeyError(
                f"the batch has no column {name!r}; it has {', '.join(self.names) or 'none'}"
            )
        return view

    def __getitem__(self, name: str) -> Column:
        """The column, fetched alone if it is elsewhere. Raises KeyError with the names there are."""
        if name not in self._read:
            column, expected = self._home(name).read(name), self.known_rows
            if expected is not None and column.rows != expected:
                raise ValueError(f"column {name!r} has {column.rows} rows in a batch of {expected}")
            self._read[name] = column
        return self._read[name]

    def read(self, name: str, index: Index | None) -> Column:
        """Some rows of a column, for another batch: its own copy where the column is not local."""
        return self._home(name).take(index).read(name)

    @property
    def metrics(self) -> Metrics:
        """The metrics that came with this result (waits for it)."""
        if self._metrics is not None:
            return self._metrics
        tables = dict.fromkeys(t for v in self.views for t in v.tables)
        return Metrics.merge(t.batch().metrics for t in tables if isinstance(t, PromisedTable))

    # Making others of it; nothing moves
    def select(self, names: Iterable[str]) -> Batch:
        """Only these columns (a missing one is an error when it is read, since a pending result may bring it)."""
        wanted = list(dict.fromkeys(names))
        views = [kept for view in self.views if (kept := view.select(wanted)) is not None]
        if self.views and not views:  # no column left: the rows are still so many
            rows = self.known_rows
            views = [self.views[0].rename({}) if rows is None else View((LocalTable({}, rows),))]
        return self._same_rows(views, {n: c for n, c in self._read.items() if n in wanted})

    def _same_rows(self, views: Iterable[View], read: dict[str, Column]) -> Batch:
        batch = Batch.of_views(views)
        batch._cuts, batch._metrics, batch._read = self._cuts, self._metrics, read
        return batch

    def drop(self, names: Iterable[str]) -> Batch:
        gone = set(names)
        return self.select([n for n in self.names if n not in gone])

    def rename(self, **names: str) -> Batch:
        """`rename(logprobs="old_logprobs")` gives the column `logprobs` the name `old_logprobs`.

        Raises KeyError for a column that is not there, ValueError for a name that is taken.
        """
        there = self.names
        for name in names:
            self._home(name)
        after = [names.get(n, n) for n in there]
        if taken := [n for n in names.values() if after.count(n) > 1]:
            raise ValueError(f"the batch has a column {taken[0]!r} already; drop it first")
        views = [v.rename({names.get(n, n): n for n in v.names()}) for v in self.views]
        return self._same_rows(views, {names.get(n, n): c for n, c in self._read.items()})

    def join(self, *others: Batch) -> Batch:
        """The columns of all, side by side. Raises ValueError where known row counts differ."""
        batches = [b for b in (self, *others) if b.views]
        counts = [b.known_rows for b in batches]
        if len({c for c in counts if c is not None}) > 1:
            raise ValueError(f"only batches with one row count can be joined, got {counts} rows")
        joined = self._same_rows([v for b in batches for v in b.views], {})
        joined._metrics = _own_metrics(batches)
        if all(v.known_names() is not None for v in joined.views):
            for b in batches:
                joined._read = {n: c for n, c in joined._read.items() if n not in b} | b._read
        return joined

    def with_columns(self, **columns: Any) -> Batch:
        return self.join(Batch(columns))

    def take(self, index: Index | Sequence[int]) -> Batch:
        """Rows by slice, index or boolean mask, in that order."""
        if not isinstance(index, slice):
            index = np.asarray(index)
            if index.dtype == bool and len(index) != self.rows:
                raise IndexError(f"a mask of {len(index)} entries for a batch of {self.rows} rows")
            index = np.flatnonzero(index) if index.dtype == bool else index.astype(np.int64)
            if len(index) and not (-self.rows <= index.min() and index.max() < self.rows):
                raise IndexError(
                    f"row {int(index[np.abs(index).argmax()])} of a batch of {self.rows} rows"
                )
            index = np.where(index < 0, index + self.rows, index)
        elif index.step not in (None, 1):
            index = np.arange(self.rows)[index]
        else:
            start, stop, _ = index.indices(self.rows)
            index = slice(start, max(start, stop), 1)
        cache: dict[int, Index | None] = {}
        return Batch.of_views(view.take(index, cache) for view in self.views)

    def whole(self, units: np.ndarray) -> Batch:
        """The same rows, those with equal entries of `units` [rows] next to each other; `split` keeps them together."""
        units = np.asarray(units)
        if len(units) != self.rows:
            raise ValueError(
                f"whole() needs one unit number for each of the {self.rows} rows, got {len(units)}"
            )
        order = np.argsort(units, kind="stable")
        batch = self if (order == np.arange(len(order))).all() else self.take(order)
        batch = self._same_rows(batch.views, batch._read)
        batch._cuts = np.concatenate([[0], np.flatnonzero(np.diff(units[order])) + 1, [len(order)]])
        return batch

    def split(self, parts: int) -> list[Batch]:
        """`parts` batches in order; sizes differ by at most one row (or unit), the first ones are larger; some may be
        empty."""
        if parts < 1:
            raise ValueError(f"a batch is split into at least one part, got {parts}")
        if parts == 1:
            return [self]
        cuts = self._cuts if self._cuts is not None else range(self.rows + 1)
        size, extra = divmod(len(cuts) - 1, parts)
        ends = [int(cuts[size * i + min(i, extra)]) for i in range(parts + 1)]
        return [self.take(slice(a, b)) for a, b in pairwise(ends)]

    def repeat(self, times: int) -> Batch:
        """Each row `times` times, copies next to each other."""
        return self if times == 1 else self.take(np.repeat(np.arange(self.rows), times))

    @classmethod
    def concat(cls, batches: Sequence[Batch]) -> Batch:
        """One behind the other; all must have the same columns (checked when they are known)."""
        batches = [b for b in batches if b.views]
        if not batches:
            return cls()
        if len(batches) == 1:
            return batches[0]
        known = [
            frozenset(b.names) for b in batches if all(v.known_names() is not None for v in b.views)
        ]
        if len(set(known)) > 1:
            differing = sorted(frozenset.union(*known) - frozenset.intersection(*known))
            raise ValueError(
                f"batches put behind one another need the same columns; not in all of them: {differing}"
            )
        whole = cls.of_views([View(tuple(t for b in batches for t in _tables(b)))])
        whole._metrics = _own_metrics(batches)
        return whole

    def __repr__(self) -> str:
        names = [n for v in self.views for n in (v.known_names() or ("...",))]
        return f"Batch({'?' if self.known_rows is None else self.known_rows} rows: {', '.join(dict.fromkeys(names))})"


def _own_metrics(batches: Iterable[Batch]) -> Metrics | None:
    own = [batch._metrics for batch in batches if batch._metrics is not None]
    return Metrics.merge(own) if own else None


def _tables(batch: Batch) -> tuple[Table, ...]:
    """The batch as tables to stand in a row: its own where it is just that, else itself as one table."""
    only = batch.views[0]
    if len(batch.views) == 1 and only.index is None and only.renames is None and only.only is None:
        return only.tables
    names = None if any(v.known_names() is None for v in batch.views) else batch.names
    return (PromisedTable(lambda: batch, batch.known_rows, names),)
