"""Parallel layouts: which rank has which coordinates, and which ranks form a process group.

HybridFlow (arXiv:2409.19256), section 5, trains with layout `p-t-d` and generates with layout
`p_g-t_g-d_g-d` on the same ranks. In its zero-redundancy groups, each rank's training shard lies
inside its generation shard. With t = 4, t_g = 2 and a parameter of four parts A to D:

    rank                              0     1     2     3
    training shard                    A     B     C     D

    zero-redundancy: replicas {0, 2} and {1, 3}
    generation shard                  AB    AB    CD    CD      each rank fetches the other part

    consecutive: replicas {0, 1} and {2, 3}
    generation shard                  AB    CD    AB    CD      ranks 1 and 2 keep B and C beside it
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import chain, product
from typing import Any

import attrs

AXES = ("tp", "cp", "pp", "dp")
"""The axes of a layout: tensor, context, pipeline and data parallelism."""
Replicas = tuple[tuple[tuple[int, ...], ...], ...]
"""Ranks by [replica][pipeline stage][tp rank]."""


@attrs.frozen
class Coords:
    """A rank's coordinates in a layout; `ep` is its expert-parallel rank, a part of its dp rank."""

    tp: int
    cp: int
    pp: int
    dp: int
    ep: int = 0


def _size(instance: Any, attribute: attrs.Attribute[int], value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{attribute.name} must be a whole number of at least 1, got {value!r}")


@attrs.frozen(slots=False)
class ParallelLayout:
    """Sizes of the axes, and the order in which ranks run through them, from fastest to slowest.

    Order "tp-cp-pp-dp" is the paper's: the ranks of a replica are consecutive. In "tp-cp-dp-pp" the
    ranks of a pipeline stage are. `ep` divides dp: experts are spread over groups of `ep`
    neighbouring dp ranks. Raises ValueError on bad sizes.
    """

    pp: int = attrs.field(default=1, validator=_size)
    """Number of pipeline stages."""
    tp: int = attrs.field(default=1, validator=_size)
    """Number of tensor-parallel ranks."""
    dp: int = attrs.field(default=1, validator=_size)
    """Number of replicas (data-parallel ranks)."""
    cp: int = attrs.field(default=1, validator=_size)
    """Number of context-parallel ranks."""
    ep: int = attrs.field(default=1, validator=_size)
    """Number of dp ranks that share a layer's experts."""
    order: str = "tp-cp-pp-dp"
    """The axes from fastest to slowest."""

    def __attrs_post_init__(self) -> None:
        if sorted(self.order.split("-")) != sorted(AXES):
            raise ValueError(
                f"order must name each of {', '.join(AXES)} once, joined by '-', got {self.order!r}"
            )
        if self.dp % self.ep:
            raise ValueError(f"ep must divide dp, got ep={self.ep}, dp={self.dp}")

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.pp * self.tp * self.dp * self.cp

    @cached_property
    def _strides(self) -> dict[str, int]:
        """Axis -> the distance between ranks that are neighbours along it."""
        # It is the product of the sizes of all faster axes.
        strides = {}
        stride = 1
        for axis in self.order.split("-"):
            strides[axis] = stride
            stride *= getattr(self, axis)
        return strides

    def coords(self, rank: int) -> Coords:
        """Return the coordinates of a rank. Raises ValueError for a rank outside the layout."""
        if not 0 <= rank < self.world:
            raise ValueError(f"rank {rank} is outside a layout of {self.world} ranks")

        # The digits of the rank in a mixed radix: the sizes of the axes.
        coords = {axis: rank // self._strides[axis] % getattr(self, axis) for axis in AXES}
        return Coords(**coords, ep=coords["dp"] % self.ep)

    def rank(self, tp: int = 0, cp: int = 0, pp: int = 0, dp: int = 0) -> int:
        """Return the rank at these coordinates. Raises ValueError for one outside the layout."""
        coords = {"tp": tp, "cp": cp, "pp": pp, "dp": dp}
        for axis, value in coords.items():
            if not 0 <= value < getattr(self, axis):
                raise ValueError(f"{axis} rank {value} is outside 0..{getattr(self, axis) - 1}")
        return sum(value * self._strides[axis] for axis, value in coords.items())

    def groups(self, axis: str) -> list[list[int]]:
        """Return the process groups of an axis: sets of ranks that differ along it alone.

        `axis` is tp, cp, pp, dp or ep, or several joined by "-" ("cp-dp": ranks that differ along
        these two). Ranks are in the axis's order, groups in that of their first rank.
        """
        if axis == "ep":
            # Neighbouring dp ranks share a layer's experts.
            groups = []
            for ranks in self.groups("dp"):
                for start in range(0, self.dp, self.ep):
                    groups.append(ranks[start : start + self.ep])
            return sorted(groups)

        names = axis.split("-")
        if unknown := [name for name in names if name not in AXES]:
            raise ValueError(f"unknown axis {unknown[0]!r}; axes are {', '.join((*AXES, 'ep'))}")

        # One group for each position along the other axes. Within it the fastest axis comes last.
        others = self._places([name for name in AXES if name not in names])
        members = self._places(sorted(names, key=self._strides.__getitem__, reverse=True))
        groups = []
        for other in others:
            groups.append([self.rank(**other, **member) for member in members])
        return sorted(groups)

    def _places(self, axes: Sequence[str]) -> list[dict[str, int]]:
        """Return all coordinates along some axes, the last of which runs fastest."""
        ranges = [range(getattr(self, axis)) for axis in axes]
        return [dict(zip(axes, place, strict=True)) for place in product(*ranges)]

    def __str__(self) -> str:
        axes = [axis for axis in ("dp", "tp", "pp", "cp", "ep") if getattr(self, axis) > 1]
        return "-".join(f"{axis}{getattr(self, axis)}" for axis in axes) or "dp1"


@attrs.frozen(slots=False)
class GenerationLayout:
    """Generation replicas over the ranks of a training layout.

    `generation_layout` makes it, and checks it.
    """

    train: ParallelLayout
    """Layout of the ranks that are cut into replicas; dp alone for engines in their own pool."""
    pp: int = 1
    """Number of pipeline stages of a generation replica."""
    tp: int = 1
    """Number of tensor-parallel ranks of a generation replica."""
    grouping: str = "zero-redundancy"
    """How ranks form replicas: "zero-redundancy" or "consecutive"; see `generation_layout`."""
    node: int | None = None
    """Number of ranks that share a node; None: all."""

    @cached_property
    def replicas(self) -> Replicas:
        """The ranks by [replica][pipeline stage][tp rank]."""
        node = self.node or self.train.world
        return _replicas(self.train, self.pp, self.tp, self.grouping, node)

    def groups(self, kind: str) -> list[list[int]]:
        """Return the process groups of a kind.

        "tp": ranks that share a layer.
        "pp": ranks that pass activations on.
        "replica": all ranks of a generation replica.
        "micro_dp": ranks of one training replica that hold equal generation shards. Where
            generation replicas span dp there are none, so each group has one rank.
        """
        if kind == "micro_dp":
            return self._micro_dp_groups()

        # A replica is a table of ranks: its rows are TP groups, its columns PP groups.
        groups: list[list[int]] = []
        for replica in self.replicas:
            if kind == "tp":
                groups += map(list, replica)
            elif kind == "pp":
                groups += map(list, zip(*replica, strict=True))
            elif kind == "replica":
                groups.append(list(chain(*replica)))
            else:
                known = "tp, pp, replica and micro_dp"
                raise ValueError(f"unknown kind of group {kind!r}; there are {known}")
        return sorted(groups)

    def _micro_dp_groups(self) -> list[list[int]]:
        """Return, for each rank of a training replica, the ranks with an equal generation shard."""
        # Ranks at the same position of their replicas hold equal generation shards.
        groups: dict[tuple[int, int], list[int]] = {}
        for number in range(len(self.replicas)):
            for position, rank in enumerate(self.ranks(number)):
                key = (self.train.coords(rank).dp, position)
                groups.setdefault(key, []).append(rank)
        return sorted(groups.values())

    @cached_property
    def replica_of(self) -> dict[int, int]:
        """Rank -> the number of its replica."""
        replica_of: dict[int, int] = {}
        for number in range(len(self.replicas)):
            replica_of |= dict.fromkeys(self.ranks(number), number)
        return replica_of

    def output_rank(self, replica: int) -> int:
        """Return the rank that has a replica's outputs: the last pipeline stage, tp 0."""
        return self.replicas[replica][-1][0]

    def ranks(self, replica: int) -> list[int]:
        """Return all ranks of a replica, pipeline stage by pipeline stage."""
        return list(chain(*self.replicas[replica]))


def generation_layout(
    train: ParallelLayout,
    pp: int = 1,
    tp: int = 1,
    grouping: str = "zero-redundancy",
    node: int | None = None,
) -> GenerationLayout:
    """Cut a training layout into generation replicas of `pp * tp` ranks (paper, section 5.3).

    "zero-redundancy": a generation TP group takes every (t/t_g)-th rank, and a PP group every
    (p/p_g)-th pipeline stage, so that a rank's training shard lies inside its generation shard.
    "consecutive": both take neighbouring ranks. cp ranks act as more generation dp.

    Where p_g does not divide p or t_g does not divide t, replicas span dp ranks: they are blocks of
    consecutive ranks. There is one exception: "zero-redundancy" with a training layout that has dp
    alone (each parameter is cut over the dp ranks). Its TP groups take every (n/t_g)-th rank of the
    n = `node` ranks (default: all) that share a node: rank i of n holds the i-th part of each
    matrix, so the rows that TP rank t generates with begin at rank t n/t_g.

    Raises ValueError when pp * tp does not divide the world, or for an unknown grouping.
    """
    if grouping not in ("zero-redundancy", "consecutive"):
        raise ValueError(f"grouping must be zero-redundancy or consecutive, got {grouping!r}")
    if pp < 1 or tp < 1 or train.world % (pp * tp):
        raise ValueError(
            f"generation replicas of pp {pp} x tp {tp} = {pp * tp} ranks do not divide the "
            f"{train.world} ranks of the training layout {train}"
        )
    return GenerationLayout(train, pp, tp, grouping, node)


def _replicas(train: ParallelLayout, pp: int, tp: int, grouping: str, node: int) -> Replicas:
    """Return the ranks of all replicas; see `generation_layout`."""
    if train.pp % pp or train.tp % tp:
        # Replicas span dp ranks: they cannot follow the training layout's tp and pp axes.
        if grouping == "zero-redundancy" and train.dp == train.world:
            return _spread(train, pp, tp, node)
        starts = range(0, train.world, pp * tp)
        return tuple(_replica(start, pp, tp, pp_stride=tp, tp_stride=1) for start in starts)

    # Each training replica becomes several generation replicas. The first rank of one, and the
    # distances between its ranks, are given along the training layout's pp and tp axes.
    pp_stride = train._strides["pp"]
    tp_stride = train._strides["tp"]
    if grouping == "zero-redundancy":
        pp_starts = range(train.pp // pp)
        tp_starts = range(train.tp // tp)
        pp_stride *= train.pp // pp
        tp_stride *= train.tp // tp
    else:
        pp_starts = range(0, train.pp, pp)
        tp_starts = range(0, train.tp, tp)

    # dp is outermost, as in `micro_dp`: replicas of one training replica are neighbours.
    replicas = []
    for dp, cp, pp_start, tp_start in product(
        range(train.dp), range(train.cp), pp_starts, tp_starts
    ):
        start = train.rank(tp=tp_start, pp=pp_start, cp=cp, dp=dp)
        replicas.append(_replica(start, pp, tp, pp_stride, tp_stride))
    return tuple(replicas)


def _spread(train: ParallelLayout, pp: int, tp: int, node: int) -> Replicas:
    """Return replicas of `pp * tp` ranks of one node, with the largest distance of TP ranks."""
    # The distance of TP ranks is node // tp; pipeline stages take neighbouring ranks.
    if train.world % node or node % (pp * tp):
        node = pp * tp  # replicas do not fill nodes evenly, so they take neighbouring ranks

    tp_stride = node // tp
    replicas: list[tuple[tuple[int, ...], ...]] = []
    for first in range(0, train.world, node):
        starts = range(first, first + tp_stride, pp)
        replicas += [_replica(start, pp, tp, 1, tp_stride) for start in starts]
    return tuple(replicas)


def _replica(
    start: int, pp: int, tp: int, pp_stride: int, tp_stride: int
) -> tuple[tuple[int, ...], ...]:
    """Return ranks by [pipeline stage][tp rank], at equal distances along both."""
    stages = range(start, start + pp * pp_stride, pp_stride)
    return tuple(tuple(range(first, first + tp * tp_stride, tp_stride)) for first in stages)
