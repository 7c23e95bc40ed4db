"""One column of a batch: a value per row, a run of values per row, or an object per row.

A token column holds runs of different lengths without padding. Three rows of 2, 0 and 3 tokens:

    values   a0 a1 c0 c1 c2        lengths   2 0 3
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import attrs
import numpy as np
import torch

Index = slice | np.ndarray
"""Rows of a column: a slice, or int64 row numbers."""


@attrs.frozen(eq=False)
class Column:
    """The values of one column, of one of three kinds.

    "row": `values` is a tensor [rows, *trailing].
    "token": `values` is a tensor [sum(lengths), *trailing], with `lengths` int64 [rows].
    "object": `values` is a list of one object per row.
    """

    values: torch.Tensor | list[Any]
    lengths: np.ndarray | None = None

    def __attrs_post_init__(self) -> None:
        if self.lengths is not None and int(self.lengths.sum()) != len(self.values):
            raise ValueError(
                f"a token column's values must have sum(lengths) = {int(self.lengths.sum())} "
                f"entries, got {len(self.values)}"
            )

    @property
    def kind(self) -> str:
        """The kind of column: "row", "token" or "object"."""
        if isinstance(self.values, list):
            return "object"
        return "row" if self.lengths is None else "token"

    @property
    def rows(self) -> int:
        """The number of rows."""
        return len(self.values) if self.lengths is None else len(self.lengths)

    def __len__(self) -> int:
        return self.rows

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor; objects count 0 (their size is known once they are pickled)."""
        return 0 if isinstance(self.values, list) else self.values.nbytes

    def __iter__(self) -> Iterator[Any]:
        """Iterate over rows: objects, tensors [length, *trailing], or tensors [*trailing]."""
        if self.lengths is None or isinstance(self.values, list):
            return iter(self.values)
        return iter(torch.split(self.values, self.lengths.tolist()))

    def take(self, index: Index, copy: bool = True) -> Column:
        """Return rows by slice or int64 array, copied (never a view that others could write to).

        With copy=False a slice shares memory, for callers that copy it themselves (the wire).
        """
        if not isinstance(index, slice):
            index = np.array(index, dtype=np.int64)  # torch takes no negative strides

        # Objects
        if isinstance(self.values, list):
            if isinstance(index, slice):
                return Column(self.values[index])
            return Column([self.values[i] for i in index.tolist()])

        # A value per row
        if self.lengths is None:
            if isinstance(index, slice):
                values = self.values[index]
                return Column(values.clone() if copy else values)
            return Column(self.values[torch.from_numpy(index)])

        # Runs: row i of a token column is values[ends[i] - lengths[i] : ends[i]], and neighbours
        # are one run.
        ends = np.cumsum(self.lengths)
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self.lengths))
            if step == 1:
                first = int(ends[start - 1]) if start else 0
                last = int(ends[stop - 1]) if stop > start else first
                values = self.values[first:last]
                return Column(
                    values.clone() if copy else values,
                    self.lengths[start : max(stop, start)].copy(),
                )
            index = np.arange(start, stop, step)

        lengths = self.lengths[index]
        positions = _positions(ends[index] - lengths, lengths)
        return Column(self.values[torch.from_numpy(positions)], lengths)

    @classmethod
    def concat(cls, columns: Sequence[Column]) -> Column:
        """Concatenate the rows of columns of one kind. Raises ValueError for several kinds.

        A column without rows may be of any kind, dtype and shape where another one has rows.
        """
        # Columns without rows are left out; if all are, the first one stands for them.
        columns = [column for column in columns if column.rows] or list(columns[:1])
        if len(columns) == 1:
            return columns[0]

        # One kind is left, or the batches do not belong together.
        kinds = {column.kind for column in columns}
        if len(kinds) > 1:
            raise ValueError(f"cannot put columns of kinds {sorted(kinds)} behind one another")
        if kinds == {"object"}:
            return cls(list(chain.from_iterable(column.values for column in columns)))

        values = torch.cat([torch.as_tensor(column.values) for column in columns])
        if kinds == {"row"}:
            return cls(values)
        lengths = [column.lengths for column in columns if column.lengths is not None]
        return cls(values, np.concatenate(lengths))

    def padded(self, fill: float = 0, width: int | None = None) -> torch.Tensor:
        """Return a token column as [rows, T, *trailing], filled with `fill` on the right.

        T is `width`, or the length of the longest row. Raises ValueError for other columns.
        """
        if self.lengths is None or isinstance(self.values, list):
            raise ValueError(f"only token columns can be padded; this one is a {self.kind} column")
        return pad_rows(self.values, self.lengths, fill, width)

    @classmethod
    def from_padded(cls, tensor: torch.Tensor, lengths: np.ndarray) -> Column:
        """Make a token column of the first lengths[i] entries of each row; undoes `padded`."""
        lengths = np.asarray(lengths, dtype=np.int64)
        mask = _mask(lengths, tensor.shape[1])
        return cls(tensor[mask.to(tensor.device)], lengths)


def pad_rows(
    values: torch.Tensor, lengths: np.ndarray, fill: float = 0, width: int | None = None
) -> torch.Tensor:
    """Pad a token column's values; see Column.padded.

    Raises ValueError for a width smaller than the longest row.
    """
    # A narrower width would cut tokens off without a word.
    longest = int(lengths.max()) if len(lengths) else 0
    width = longest if width is None else width
    if width < longest:
        raise ValueError(f"width {width} is smaller than the longest row ({longest})")

    padded = values.new_full((len(lengths), width, *values.shape[1:]), fill)
    padded[_mask(lengths, width).to(values.device)] = values
    return padded


def _mask(lengths: np.ndarray, width: int) -> torch.Tensor:
    """Return bool [rows, width]: True for the first lengths[i] entries of row i."""
    lengths = np.asarray(lengths, dtype=np.int64)
    return torch.arange(width)[None] < torch.from_numpy(lengths)[:, None]


def _positions(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return flat positions of runs, int64: starts[0], starts[0] + 1, ... for each run, in order.

    Entry k of the result lies in some run r, and is k + starts[r] - (the lengths before run r).
    """
    total = int(lengths.sum())
    shifts = starts
    if len(lengths):
        shifts = starts - np.concatenate([[0], np.cumsum(lengths)[:-1]])
    positions = np.arange(total) + np.repeat(shifts, lengths)
    return np.asarray(positions, dtype=np.int64)


def tokens(rows: Sequence[Any], dtype: torch.dtype | None = None) -> Column:
    """Make a token column from one sequence (list, array or tensor) per row.

    The default dtype is that of the sequences, or int64 if all of them are empty.
    """
    # A tensor keeps its dtype; NumPy chooses that of lists.
    parts = [
        row if isinstance(row, torch.Tensor) else torch.as_tensor(np.asarray(row)) for row in rows
    ]
    lengths = np.array([len(part) for part in parts], dtype=np.int64)

    # An empty list has no dtype of its own to impose.
    filled = [part for part in parts if len(part)]
    if not filled:
        return Column(torch.empty(0, dtype=dtype or torch.int64), lengths)
    values = torch.cat(filled)
    return Column(values if dtype is None else values.to(dtype), lengths)


def as_column(value: Any) -> Column:
    """Make a column from a tensor or array (a value per row), or a list (an object per row).

    A Column is returned unchanged. Raises TypeError for anything else.
    """
    if isinstance(value, Column):
        return value
    if isinstance(value, torch.Tensor):
        return Column(value)
    if isinstance(value, np.ndarray):
        return Column(torch.from_numpy(value))
    if isinstance(value, (list, tuple)):
        return Column(list(value))
    raise TypeError(
        "a column is a Column, a tensor or array (a value per row) or a list (an object per row), "
        f"got {type(value).__name__}"
    )


def compose(outer: Index | None, inner: Index | None, rows: int) -> Index | None:
    """Return the index that first applies `outer`, on `rows` rows, then `inner` on its result."""
    if outer is None or inner is None:
        return inner if outer is None else outer

    if isinstance(outer, slice):
        start, stop, step = outer.indices(rows)

        # A slice of a slice is a slice again. Steps are positive: Batch.take sees to it.
        if isinstance(inner, slice):
            taken = range(start, stop, step)[inner]
            if taken.step > 0 and len(taken):
                return slice(taken.start, taken.stop, taken.step)
            return slice(0, 0, 1)
        return start + step * np.asarray(inner)
    return outer[inner]


def index_rows(index: Index | None, rows: int) -> int:
    """Return the number of rows that an index takes of `rows` rows; None takes all."""
    if index is None:
        return rows
    return len(range(*index.indices(rows))) if isinstance(index, slice) else len(index)
