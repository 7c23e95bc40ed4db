"""Layouts of weights: which rank holds which boxes of which parameter, in trainers and engines.

A *box* is an axis-aligned part of a parameter; the *shard* of a rank is the values of its boxes.
Canonical names and shapes are those of the exported safetensors (Hugging Face).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod

import attrs
import torch


@attrs.frozen
class Box:
    """A half-open box in an n-dimensional parameter: start[i] <= index[i] < stop[i], by element."""

    start: tuple[int, ...]
    """The first index along each dimension."""
    stop: tuple[int, ...]
    """One more than the last index along each dimension."""

    @classmethod
    def full(cls, shape: Iterable[int]) -> Box:
        """Make the box of a whole parameter."""
        stop = tuple(int(size) for size in shape)
        return cls((0,) * len(stop), stop)

    @classmethod
    def part(cls, shape: Sequence[int], dim: int, start: int, stop: int) -> Box:
        """Make the box of a whole parameter but for [start, stop) along `dim`."""
        full = cls.full(shape)
        return cls(
            (*full.start[:dim], start, *full.start[dim + 1 :]),
            (*full.stop[:dim], stop, *full.stop[dim + 1 :]),
        )

    # --- sizes and slices ---

    @property
    def shape(self) -> tuple[int, ...]:
        """The size along each dimension."""
        return tuple(stop - start for start, stop in zip(self.start, self.stop, strict=True))

    @property
    def numel(self) -> int:
        """The number of elements; 0 where a dimension is empty."""
        return prod(max(size, 0) for size in self.shape)

    def slices(self) -> tuple[slice, ...]:
        """Return the slices of this box in the whole parameter."""
        return tuple(slice(*interval) for interval in zip(self.start, self.stop, strict=True))

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Return the slices of this box in a tensor that holds the box `outer`."""
        return tuple(
            slice(start - offset, stop - offset)
            for start, stop, offset in zip(self.start, self.stop, outer.start, strict=True)
        )

    # --- with another box ---

    def intersect(self, other: Box) -> Box | None:
        """Return the box that both hold, or None."""
        # Empty along one dimension is empty altogether.
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return Box(start, stop) if all(map(operator.lt, start, stop)) else None

    def minus(self, other: Box) -> Iterator[Box]:
        """Yield disjoint boxes with the elements of this one that `other` does not have.

        There are at most two for each dimension.
        """
        common = self.intersect(other)
        if common is None:
            if self.numel:
                yield self
            return

        # Dimension by dimension, cut off the parts before and after the common one.
        start = list(self.start)
        stop = list(self.stop)
        for dim in range(len(common.start)):
            if start[dim] < common.start[dim]:
                end = [*stop[:dim], common.start[dim], *stop[dim + 1 :]]
                yield Box(tuple(start), tuple(end))
            if common.stop[dim] < stop[dim]:
                begin = [*start[:dim], common.stop[dim], *start[dim + 1 :]]
                yield Box(tuple(begin), tuple(stop))
            start[dim] = common.start[dim]
            stop[dim] = common.stop[dim]

    def flat_range(self, start: int, stop: int) -> Iterator[Box]:
        """Yield the elements start..stop of this box in row-major order: at most 2n-1 boxes.

        The flat shard (ZeRO) of an n-dimensional parameter is such a range.
        """
        return _flat(self.start, self.shape, start, stop)

    def __str__(self) -> str:
        intervals = zip(self.start, self.stop, strict=True)
        return "[" + ", ".join(f"{start}:{stop}" for start, stop in intervals) + "]"


def _flat(origin: tuple[int, ...], shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Yield elements start..stop of the box at `origin`: part of a row, whole rows, part of a row.

        . . . . x x x     inside(head - 1), from start to the row's end
        x x x x x x x     rows head..tail, one box
        x x . . . . .     inside(tail), up to stop

    A "row" is what one index of the first dimension selects; its part is again a flat range.
    """
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
        return

    # Rows head..tail are whole; `row` is the number of elements of each.
    first = origin[0]
    rest = origin[1:]
    row = prod(shape[1:])
    head = -(-start // row)
    tail = stop // row

    def inside(index: int, start: int, stop: int) -> Iterator[Box]:
        for box in _flat(rest, shape[1:], start, stop):
            yield Box((first + index, *box.start), (first + index + 1, *box.stop))

    if head > tail:  # the range lies within one row
        yield from inside(tail, start - tail * row, stop - tail * row)
        return

    # The part before the whole rows, these rows, and the part after them, if not empty.
    if start < head * row:
        yield from inside(head - 1, start - (head - 1) * row, row)
    if head < tail:
        ends = map(operator.add, rest, shape[1:])
        yield Box((first + head, *rest), (first + tail, *ends))
    if tail * row < stop:
        yield from inside(tail, 0, stop - tail * row)


@attrs.frozen(eq=False)
class LazyShard:
    """A shard whose values are computed at each read, with the same bits (merged adapters, say)."""

    shape: tuple[int, ...]
    """Shape of the box."""
    make: Callable[[], torch.Tensor]
    """Computes the values of the whole box."""

    def __getitem__(self, place: tuple[slice, ...]) -> torch.Tensor:
        return self.make()[place]


Shard = torch.Tensor | LazyShard
"""The values that one rank holds of a box."""


@attrs.frozen
class Param:
    """A whole parameter: its canonical shape, and the dtype that this side stores."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole parameter in the dtype that this side stores."""
        return self.numel * self.dtype.itemsize


Shards = Mapping[int, tuple[Box, ...]]
"""rank -> the boxes of one parameter that it holds."""


class _ByRank(Mapping[int, Mapping[str, tuple[Box, ...]]]):
    """rank -> name -> boxes, as a view of name -> rank -> boxes.

    A rank's entry is computed when it is asked for, so that thousands of ranks cost nothing.
    """

    def __init__(self, shards: Mapping[str, Shards], ranks: Iterable[int]):
        self.shards = shards
        self._ranks = dict.fromkeys(ranks)

    def __getitem__(self, rank: int) -> dict[str, tuple[Box, ...]]:
        if rank not in self._ranks:
            raise KeyError(rank)
        return {name: boxes[rank] for name, boxes in self.shards.items() if rank in boxes}

    def __iter__(self) -> Iterator[int]:
        return iter(self._ranks)

    def __len__(self) -> int:
        return len(self._ranks)


@attrs.frozen(eq=False)
class WeightLayout:
    """Which boxes of each parameter each rank holds; `()`, nothing, is legal.

    Boxes are parts of the canonical parameter, for any form of storage: padding is in none of them.
    A backend or engine that fuses, interleaves or transposes parameters returns a view of a box, or
    copies it in and out.
    """

    params: Mapping[str, Param]
    """Canonical name -> parameter."""
    held: Mapping[int, Mapping[str, tuple[Box, ...]]]
    """rank -> canonical name -> disjoint boxes."""
    ties: Mapping[str, str] = attrs.field(factory=dict)
    """Tied name -> the name whose storage it shares; tied names are not in `params`."""
    opaque: frozenset[str] = frozenset()
    """Parameters whose storage has no views (packed, interleaved or quantised): values are copied
    in."""

    @classmethod
    def by_name(
        cls,
        params: Mapping[str, Param],
        shards: Mapping[str, Shards],
        ranks: Iterable[int],
        ties: Mapping[str, str] | None = None,
        opaque: Iterable[str] = (),
    ) -> WeightLayout:
        """Make a layout of name -> rank -> boxes.

        Parameters that are cut alike should share one Shards object.
        """
        return cls(params, _ByRank(shards, ranks), ties or {}, frozenset(opaque))

    @property
    def ranks(self) -> list[int]:
        """All ranks, in ascending order."""
        return sorted(self.held)

    def shards(self) -> Mapping[str, Shards]:
        """Return the layout as name -> rank -> boxes."""
        if isinstance(self.held, _ByRank):
            return self.held.shards

        # Every parameter has an entry, also one that no rank holds.
        shards: dict[str, dict[int, tuple[Box, ...]]] = {name: {} for name in self.params}
        for rank, holding in self.held.items():
            for name, boxes in holding.items():
                shards.setdefault(name, {})[rank] = tuple(boxes)
        return shards

    def nbytes(self, rank: int) -> int:
        """Return the number of bytes of parameters that a rank holds."""
        nbytes = 0
        for name, boxes in self.held.get(rank, {}).items():
            nbytes += self.params[name].dtype.itemsize * sum(box.numel for box in boxes)
        return nbytes

    def renumbered(self, number: Callable[[int], int]) -> WeightLayout:
        """Return the same layout on other ranks, such as those after another pool's ranks."""
        # Parameters that share a Shards object go on sharing it.
        by_id: dict[int, dict[int, tuple[Box, ...]]] = {}
        shards = self.shards()
        for held in shards.values():
            if id(held) not in by_id:
                by_id[id(held)] = {number(rank): boxes for rank, boxes in held.items()}

        renumbered = {name: by_id[id(held)] for name, held in shards.items()}
        return WeightLayout.by_name(
            self.params, renumbered, map(number, self.held), self.ties, self.opaque
        )
