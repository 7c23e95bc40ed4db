"""One column of a batch: a value per row, a run of values per row (ragged, no padding), or an object per row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import numpy as np
import torch

Index = slice | np.ndarray


@attrs.frozen(eq=False)
class Column:
    """`values` is a tensor [rows, *trailing], or [sum(lengths), *trailing] when `lengths` (int64 [rows]) is given, or a
    list of one object per row."""

    values: torch.Tensor | list[Any]
    lengths: np.ndarray | None = None

    def __attrs_post_init__(self) -> None:
        if self.lengths is not None and int(self.lengths.sum()) != len(self.values):
            raise ValueError(
                f"a token column's values must have sum(lengths) = {int(self.lengths.sum())} entries, "
                f"got {len(self.values)}"
            )

    @property
    def kind(self) -> str:
        """ "row", "token" or "object"."""
        if isinstance(self.values, list):
            return "object"
        return "row" if self.lengths is None else "token"

    @property
    def rows(self) -> int:
        return len(self.values) if self.lengths is None else len(self.lengths)

    def __len__(self) -> int:
        return self.rows

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor; objects count 0 (their size is known once they are pickled)."""
        return 0 if isinstance(self.values, list) else self.values.nbytes

    def __iter__(self) -> Iterator[Any]:
        """Row by row: objects, tensors [length, *trailing], or tensors [*trailing]."""
        if self.lengths is None or isinstance(self.values, list):
            return iter(self.values)
        return iter(torch.split(self.values, self.lengths.tolist()))

    def take(self, index: Index, copy: bool = True) -> Column:
        """Rows by slice or int64 array, copied (never a view that another holder could write to).

        copy=False lets a slice share memory, for whoever copies it himself (the wire).
        """
        if not isinstance(index, slice):
            index = np.array(index, dtype=np.int64)  # torch takes no negative strides
        if isinstance(self.values, list):
            if isinstance(index, slice):
                return Column(self.values[index])
            return Column([self.values[i] for i in index.tolist()])
        if self.lengths is None:
            if isinstance(index, slice):
                return Column(self.values[index].clone() if copy else self.values[index])
            return Column(self.values[torch.from_numpy(index)])
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
        return Column(
            self.values[torch.from_numpy(_positions(ends[index] - lengths, lengths))], lengths
        )

    @classmethod
    def concat(cls, columns: Sequence[Column]) -> Column:
        """One behind the other. Empty ones say nothing about kind, dtype or shape where another one has rows."""
        columns = [c for c in columns if c.rows] or list(columns[:1])
        if len(columns) == 1:
            return columns[0]
        kinds = {c.kind for c in columns}
        if len(kinds) > 1:
            raise ValueError(f"cannot put columns of kinds {sorted(kinds)} behind one another")
        if kinds == {"object"}:
            return cls([v for c in columns for v in c.values])
        values = torch.cat([torch.as_tensor(c.values) for c in columns])
        if kinds == {"row"}:
            return cls(values)
        return cls(values, np.concatenate([c.lengths for c in columns if c.lengths is not None]))

    def padded(self, fill: float = 0, width: int | None = None) -> torch.Tensor:
        """[rows, T, *trailing], T the longest row (or `width`), short rows filled on the right with `fill`."""
        if self.lengths is None or isinstance(self.values, list):
            raise ValueError(f"only token columns can be padded; this one is a {self.kind} column")
        return pad_rows(self.values, self.lengths, fill, width)

    @classmethod
    def from_padded(cls, tensor: torch.Tensor, lengths: np.ndarray) -> Column:
        """The inverse of `padded`: keeps the first lengths[i] entries of row i."""
        mask = (
            torch.arange(tensor.shape[1])[None]
            < torch.from_numpy(np.asarray(lengths, dtype=np.int64))[:, None]
        )
        return cls(tensor[mask.to(tensor.device)], np.asarray(lengths, dtype=np.int64))


def pad_rows(
    values: torch.Tensor, lengths: np.ndarray, fill: float = 0, width: int | None = None
) -> torch.Tensor:
    longest = int(lengths.max()) if len(lengths) else 0
    width = longest if width is None else width
    if width < longest:
        raise ValueError(f"width {width} is smaller than the longest row ({longest})")
    out = values.new_full((len(lengths), width, *values.shape[1:]), fill)
    mask = (
        torch.arange(width)[None] < torch.from_numpy(np.asarray(lengths, dtype=np.int64))[:, None]
    )
    out[mask.to(values.device)] = values
    return out


def _positions(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Flat positions of runs: [starts[0], starts[0]+1, ...] for each run, in order."""
    total = int(lengths.sum())
    shift = np.repeat(
        starts - np.concatenate([[0], np.cumsum(lengths)[:-1]]) if len(lengths) else starts, lengths
    )
    return np.asarray(np.arange(total) + shift, dtype=np.int64)


def tokens(rows: Sequence[Any], dtype: torch.dtype | None = None) -> Column:
    """A token column from one sequence (list, array or tensor) per row; int64 if all are empty and no dtype is given."""
    parts = [torch.as_tensor(np.asarray(r) if not isinstance(r, torch.Tensor) else r) for r in rows]
    lengths = np.array([len(p) for p in parts], dtype=np.int64)
    filled = [p for p in parts if len(p)]  # an empty list has no dtype of its own to impose
    if not filled:
        return Column(torch.empty(0, dtype=dtype or torch.int64), lengths)
    values = torch.cat(filled)
    return Column(values if dtype is None else values.to(dtype), lengths)


def as_column(value: Any) -> Column:
    """A Column as it is; a tensor or array: a value per row; a list or tuple: an object per row."""
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
    """The index that first applies `outer` (on a table of `rows` rows), then `inner` on its result."""
    if outer is None or inner is None:
        return inner if outer is None else outer
    if isinstance(outer, slice):
        start, stop, step = outer.indices(rows)
        steps = range(start, stop, step)
        if isinstance(inner, slice):
            r = steps[inner]
            return slice(r.start, r.stop, r.step) if r.step > 0 and len(r) else slice(0, 0, 1)
        return start + step * np.asarray(inner)
    return outer[inner]


def index_rows(index: Index | None, rows: int) -> int:
    if index is None:
        return rows
    return len(range(*index.indices(rows))) if isinstance(index, slice) else len(index)
