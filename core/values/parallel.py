"""Parallel layouts: which rank holds which coordinate, and who talks to whom.

HybridFlow (arXiv:2409.19256) section 5: training layout `p-t-d`, generation layout `p_g-t_g-d_g-d`.
"""

from __future__ import annotations

from functools import cached_property
from itertools import product
from typing import Any

import attrs

AXES = ("tp", "cp", "pp", "dp")
Replicas = tuple[tuple[tuple[int, ...], ...], ...]
"""Replica -> [pp stage][tp rank] -> rank."""


@attrs.frozen
class Coords:
    """A rank's place in a layout; `ep` is its expert-parallel rank, the fast part of its dp rank."""

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
    """Sizes of the axes and the order in which ranks run through them, from fastest to slowest.

    `order` "tp-cp-pp-dp" is the paper's (the ranks of a replica are consecutive); in "tp-cp-dp-pp"
    the ranks of a pipeline stage are. `ep` divides dp: experts are spread over groups of `ep` neighbouring dp ranks.
    Raises ValueError on bad sizes.
    """

    pp: int = attrs.field(default=1, validator=_size)
    tp: int = attrs.field(default=1, validator=_size)
    dp: int = attrs.field(default=1, validator=_size)
    cp: int = attrs.field(default=1, validator=_size)
    ep: int = attrs.field(default=1, validator=_size)
    order: str = "tp-cp-pp-dp"

    def __attrs_post_init__(self) -> None:
        if sorted(self.order.split("-")) != sorted(AXES):
            raise ValueError(
                f"order must name each of {', '.join(AXES)} once, joined by '-', got {self.order!r}"
            )
        if self.dp % self.ep:
            raise ValueError(f"ep must divide dp, got ep={self.ep}, dp={self.dp}")

    @property
    def world(self) -> int:
        return self.pp * self.tp * self.dp * self.cp

    @cached_property
    def _strides(self) -> dict[str, int]:
        strides, stride = {}, 1
        for axis in self.order.split("-"):
            strides[axis] = stride
            stride *= getattr(self, axis)
        return strides

    def coords(self, rank: int) -> Coords:
        if not 0 <= rank < self.world:
            raise ValueError(f"rank {rank} is outside a layout of {self.world} ranks")
        at = {axis: rank // self._strides[axis] % getattr(self, axis) for axis in AXES}
        return Coords(**at, ep=at["dp"] % self.ep)

    def rank(self, tp: int = 0, cp: int = 0, pp: int = 0, dp: int = 0) -> int:
        at = {"tp": tp, "cp": cp, "pp": pp, "dp": dp}
        for axis, value in at.items():
            if not 0 <= value < getattr(self, axis):
                raise ValueError(f"{axis} rank {value} is outside 0..{getattr(self, axis) - 1}")
        return sum(value * self._strides[axis] for axis, value in at.items())

    def groups(self, axis: str) -> list[list[int]]:
        """The process groups of an axis: ranks that differ in it alone, each in the axis's order, by first rank.

        `axis` is tp, cp, pp, dp or ep, or several joined by "-" ("cp-dp": ranks that differ in these).
        """
        if axis == "ep":
            return sorted(
                g[i : i + self.ep] for g in self.groups("dp") for i in range(0, self.dp, self.ep)
            )
        names = axis.split("-")
        if unknown := [n for n in names if n not in AXES]:
            raise ValueError(f"unknown axis {unknown[0]!r}; axes are {', '.join((*AXES, 'ep'))}")
        others = [a for a in AXES if a not in names]
        inner = sorted(names, key=self._strides.__getitem__, reverse=True)
        return sorted(
            [
                self.rank(
                    **dict(zip(others, fixed, strict=True)), **dict(zip(inner, moving, strict=True))
                )
                for moving in product(*(range(getattr(self, a)) for a in inner))
            ]
            for fixed in product(*(range(getattr(self, a)) for a in others))
        )

    def __str__(self) -> str:
        sizes = [
            f"{a}{getattr(self, a)}" for a in ("dp", "tp", "pp", "cp", "ep") if getattr(self, a) > 1
        ]
        return "-".join(sizes) or "dp1"


@attrs.frozen(slots=False)
class GenerationLayout:
    """Generation replicas over the ranks of a training layout. Made by `generation_layout`, which checks it."""

    train: ParallelLayout
    pp: int = 1
    tp: int = 1
    grouping: str = "zero-redundancy"
    node: int | None = None
    """Ranks that share a node; None: all."""

    @cached_property
    def replicas(self) -> Replicas:
        """Replica -> [pp stage][tp rank] -> rank."""
        return _replicas(self.train, self.pp, self.tp, self.grouping, self.node or self.train.world)

    def groups(self, kind: str) -> list[list[int]]:
        """ "tp": ranks that share a layer; "pp": ranks that pass activations on; "micro_dp": ranks of one training
        replica that hold equal generation shards (empty of meaning, so one rank each, when replicas span dp)."""
        if kind == "tp":
            return sorted(list(stage) for replica in self.replicas for stage in replica)
        if kind == "pp":
            return sorted([stage[t] for stage in r] for r in self.replicas for t in range(self.tp))
        if kind == "micro_dp":
            cells: dict[tuple[int, int, int], list[int]] = {}
            for replica in self.replicas:
                for p, stage in enumerate(replica):
                    for t, rank in enumerate(stage):
                        cells.setdefault((self._train_replica(rank), p, t), []).append(rank)
            return sorted(cells.values())
        raise ValueError(f"unknown kind of group {kind!r}; there are tp, pp and micro_dp")

    def _train_replica(self, rank: int) -> int:
        return self.train.coords(rank).dp

    @cached_property
    def replica_of(self) -> dict[int, int]:
        return {
            rank: i
            for i, replica in enumerate(self.replicas)
            for stage in replica
            for rank in stage
        }

    def output_rank(self, replica: int) -> int:
        """Last stage, tp 0."""
        return self.replicas[replica][-1][0]

    def ranks(self, replica: int) -> list[int]:
        return [rank for stage in self.replicas[replica] for rank in stage]


def generation_layout(
    train: ParallelLayout,
    pp: int = 1,
    tp: int = 1,
    grouping: str = "zero-redundancy",
    node: int | None = None,
) -> GenerationLayout:
    """Cut a training layout into generation replicas of `pp * tp` ranks (paper, section 5.3).

    "zero-redundancy": a generation TP group takes every (t/t_g)-th rank and a PP group every (p/p_g)-th stage, so that
    a rank's training shard lies inside its generation shard. "consecutive": neighbouring ranks. cp ranks act as more
    generation dp.

    Where p_g does not divide p or t_g does not divide t, replicas span dp ranks: consecutive blocks, or, for
    "zero-redundancy" of a training layout that has dp alone (each parameter cut over the dp ranks), every
    (n/t_g)-th rank of the n = `node` ranks (default: all) that share a node: rank i of n holds the i-th part of each
    matrix, so the rows that TP rank t generates with begin at rank t n/t_g.
    Raises ValueError when pp * tp does not divide the world, or for an unknown grouping.
    """
    if grouping not in ("zero-redundancy", "consecutive"):
        raise ValueError(f"grouping must be zero-redundancy or consecutive, got {grouping!r}")
    if pp < 1 or tp < 1 or train.world % (pp * tp):
        raise ValueError(
            f"generation replicas of pp {pp} x tp {tp} = {pp * tp} ranks do not divide the {train.world} ranks of the "
            f"training layout {train}"
        )
    return GenerationLayout(train, pp, tp, grouping, node)


def _replicas(train: ParallelLayout, pp: int, tp: int, grouping: str, node: int) -> Replicas:
    if train.pp % pp or train.tp % tp:
        if grouping == "zero-redundancy" and train.dp == train.world:
            return _spread(train, pp, tp, node)
        blocks = [list(range(i, i + pp * tp)) for i in range(0, train.world, pp * tp)]
        replicas = [tuple(tuple(b[p * tp : (p + 1) * tp]) for p in range(pp)) for b in blocks]
        return tuple(replicas)
    step_t, step_p = train.tp // tp, train.pp // pp
    replicas = []
    for dp, cp, m_p, m_t in product(range(train.dp), range(train.cp), range(step_p), range(step_t)):

        def at(
            p_g: int, t_g: int, dp: int = dp, cp: int = cp, m_p: int = m_p, m_t: int = m_t
        ) -> int:
            if grouping == "zero-redundancy":
                return train.rank(tp=t_g * step_t + m_t, pp=p_g * step_p + m_p, cp=cp, dp=dp)
            return train.rank(tp=m_t * tp + t_g, pp=m_p * pp + p_g, cp=cp, dp=dp)

        replicas.append(tuple(tuple(at(p, t) for t in range(tp)) for p in range(pp)))
    return tuple(replicas)


def _spread(train: ParallelLayout, pp: int, tp: int, node: int) -> Replicas:
    """Replicas of `pp * tp` of the `node` ranks of one node, TP ranks as far apart as they can be."""
    if train.world % node or node % (pp * tp):
        node = pp * tp  # replicas that fit no node evenly: neighbours
    step = node // tp
    replicas = [
        tuple(tuple(first + t * step + m * pp + p for t in range(tp)) for p in range(pp))
        for first in range(0, train.world, node)
        for m in range(step // pp)
    ]
    return tuple(replicas)
