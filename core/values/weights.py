"""Who holds which part of which parameter: the language that training backends and rollout engines share.

Canonical names and shapes are those of the exported safetensors (Hugging Face).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod

import attrs
import torch


@attrs.frozen
class Box:
    """A half-open interval of an n-dimensional parameter, in elements: start[i] <= index[i] < stop[i]."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @classmethod
    def full(cls, shape: Iterable[int]) -> Box:
        stop = tuple(int(s) for s in shape)
        return cls((0,) * len(stop), stop)

    @classmethod
    def part(cls, shape: Sequence[int], dim: int, start: int, stop: int) -> Box:
        """The whole of `shape` but for [start, stop) along `dim`."""
        whole = cls.full(shape)
        return cls(
            (*whole.start[:dim], start, *whole.start[dim + 1 :]),
            (*whole.stop[:dim], stop, *whole.stop[dim + 1 :]),
        )

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def numel(self) -> int:
        return prod(max(b - a, 0) for a, b in zip(self.start, self.stop, strict=True))

    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(a, b) for a, b in zip(self.start, self.stop, strict=True))

    def within(self, outer: Box) -> tuple[slice, ...]:
        """The slices of this box in a tensor that holds `outer`."""
        return tuple(
            slice(a - o, b - o) for a, b, o in zip(self.start, self.stop, outer.start, strict=True)
        )

    def intersect(self, other: Box) -> Box | None:
        """What both hold, or None."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return Box(start, stop) if all(a < b for a, b in zip(start, stop, strict=True)) else None

    def minus(self, other: Box) -> Iterator[Box]:
        """Disjoint boxes of what this one holds and `other` does not: at most two for each dimension."""
        common = self.intersect(other)
        if common is None:
            if self.numel:
                yield self
            return
        start, stop = list(self.start), list(self.stop)
        for dim, (a, b) in enumerate(zip(common.start, common.stop, strict=True)):
            if start[dim] < a:
                yield Box(tuple(start), tuple([*stop[:dim], a, *stop[dim + 1 :]]))
            if b < stop[dim]:
                yield Box(tuple([*start[:dim], b, *start[dim + 1 :]]), tuple(stop))
            start[dim], stop[dim] = a, b

    def flat_range(self, start: int, stop: int) -> Iterator[Box]:
        """The elements start..stop of this box in row-major order: at most 2n-1 boxes, in that order.

        A flat shard (ZeRO) of an n-dimensional parameter is one.
        """
        yield from (Box(tuple(a), tuple(b)) for a, b in _flat(self.start, self.shape, start, stop))

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{b}" for a, b in zip(self.start, self.stop, strict=True)) + "]"


def _flat(
    origin: tuple[int, ...], shape: tuple[int, ...], start: int, stop: int
) -> Iterator[tuple[list[int], list[int]]]:
    if start >= stop:
        return
    if not shape:
        yield [], []
        return
    row, first = prod(shape[1:]), origin[0]
    head, tail = -(-start // row), stop // row  # whole rows head..tail

    def inside(at: int, a: int, b: int) -> Iterator[tuple[list[int], list[int]]]:
        for lo, hi in _flat(origin[1:], shape[1:], a, b):
            yield [first + at, *lo], [first + at + 1, *hi]

    if head > tail:  # within one row
        yield from inside(tail, start - tail * row, stop - tail * row)
        return
    if start < head * row:
        yield from inside(head - 1, start - (head - 1) * row, row)
    if head < tail:
        whole = Box.full(shape[1:])
        rest = list(origin[1:])
        yield (
            [first + head, *rest],
            [first + tail, *(o + n for o, n in zip(rest, whole.stop, strict=True))],
        )
    if tail * row < stop:
        yield from inside(tail, 0, stop - tail * row)


@attrs.frozen(eq=False)
class LazyShard:
    """A shard whose values are made whenever it is read, with the same bits each time: adapters that are merged, say."""

    shape: tuple[int, ...]
    make: Callable[[], torch.Tensor]

    def __getitem__(self, place: tuple[slice, ...]) -> torch.Tensor:
        return self.make()[place]


Shard = torch.Tensor | LazyShard


@attrs.frozen
class Param:
    """The whole of a parameter: its canonical shape and the dtype that this side stores."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


Shards = Mapping[int, tuple[Box, ...]]
"""rank -> the boxes of one parameter that it holds."""


class _ByRank(Mapping[int, Mapping[str, tuple[Box, ...]]]):
    """rank -> name -> boxes, read off name -> rank -> boxes: made when asked for, so that thousands of ranks cost nothing."""

    def __init__(self, shards: Mapping[str, Shards], ranks: Iterable[int]):
        self.shards, self._ranks = shards, dict.fromkeys(ranks)

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
    """Which boxes of each parameter each rank holds; `()` (nothing) is a legal holding.

    Boxes are of the canonical parameter, whatever the storage: padding is in none of them; what is fused, interleaved or
    transposed is the holder's affair, who gives a view of a box or copies it in and out.
    """

    params: Mapping[str, Param]
    held: Mapping[int, Mapping[str, tuple[Box, ...]]]
    """rank -> canonical name -> disjoint boxes."""
    ties: Mapping[str, str] = attrs.field(factory=dict)
    """Tied name -> the name whose storage it shares; tied names are not in `params`."""
    opaque: frozenset[str] = frozenset()
    """Parameters into whose storage the holder gives no view (packed, interleaved, quantised): values are copied in."""

    @classmethod
    def by_name(
        cls,
        params: Mapping[str, Param],
        shards: Mapping[str, Shards],
        ranks: Iterable[int],
        ties: Mapping[str, str] | None = None,
        opaque: Iterable[str] = (),
    ) -> WeightLayout:
        """The same, given as name -> rank -> boxes. Parameters that are cut alike should share one Shards object."""
        return cls(params, _ByRank(shards, ranks), ties or {}, frozenset(opaque))

    @property
    def ranks(self) -> list[int]:
        return sorted(self.held)

    def shards(self) -> Mapping[str, Shards]:
        """name -> rank -> boxes."""
        if isinstance(self.held, _ByRank):
            return self.held.shards
        found: dict[str, dict[int, tuple[Box, ...]]] = {name: {} for name in self.params}
        for rank, holding in self.held.items():
            for name, boxes in holding.items():
                found.setdefault(name, {})[rank] = tuple(boxes)
        return found

    def nbytes(self, rank: int) -> int:
        """Bytes of parameters that a rank holds."""
        holding = self.held.get(rank, {})
        return sum(
            self.params[n].dtype.itemsize * sum(b.numel for b in boxes)
            for n, boxes in holding.items()
        )

    def renumbered(self, number: Callable[[int], int]) -> WeightLayout:
        """The same on other ranks: those of another pool, say, behind the first pool's."""
        memo: dict[int, dict[int, tuple[Box, ...]]] = {}
        shards = self.shards()
        for held in shards.values():
            if id(held) not in memo:
                memo[id(held)] = {number(rank): boxes for rank, boxes in held.items()}
        renamed = {name: memo[id(held)] for name, held in shards.items()}
        return WeightLayout.by_name(
            self.params, renamed, map(number, self.held), self.ties, self.opaque
        )
