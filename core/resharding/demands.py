"""What receivers lack, and who sends it: each byte once, senders balanced over the ranks that hold it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import attrs
import numpy as np

from hybridflow.core.resharding.balance import balance
from hybridflow.core.resharding.boxes import covers, disjoint, overlaps
from hybridflow.core.resharding.flows import Flow
from hybridflow.core.values.weights import Box, Shards


def common(mine: Sequence[Box], boxes: Sequence[Box]) -> int:
    """Elements that two lists of disjoint boxes share."""
    if boxes is mine or boxes == mine:
        return sum(b.numel for b in boxes)
    return sum(
        common.numel for box in boxes for own in mine if (common := box.intersect(own)) is not None
    )


@attrs.frozen(eq=False)
class Demand:
    """One box of a class of parameters: who wants it, which of these have it, and everybody who has it."""

    names: tuple[str, ...]
    box: Box
    itemsize: int
    wanters: np.ndarray
    holders: frozenset[int]
    senders: tuple[int, ...]

    @property
    def count(self) -> int:
        return len(self.wanters) - len(self.holders)

    @property
    def nbytes(self) -> int:
        return len(self.names) * self.box.numel * self.itemsize * self.count


def lacking(names: tuple[str, ...], itemsize: int, have: Shards, want: Shards):
    """The demands of a class, and (box, rank) of what nobody holds."""
    atoms = _atoms(have)
    boxes = [box for box, _ in atoms]
    owners = [(tuple(sorted(ranks)), frozenset(ranks)) for _, ranks in atoms]
    wanted: dict[Box, list[int]] = defaultdict(list)
    for rank, targets in want.items():
        for box in targets:
            if box.numel:
                wanted[box].append(rank)
    demands, holes = [], []
    index = overlaps(boxes)
    for box, ranks in sorted(wanted.items(), key=lambda item: (item[0].start, item[0].stop)):
        wanters = np.array(sorted(ranks))
        among = frozenset(ranks)
        found = index(box)
        pieces = [(box.intersect(boxes[at]), at) for at in found]
        if sum(piece.numel for piece, _ in pieces if piece) != box.numel:
            holes += [(hole, min(ranks)) for hole in covers(box, [boxes[at] for at in found])]
            continue
        for piece, at in pieces:
            senders, owner = owners[at]
            holders = owner & among if len(owner) < len(among) else among & owner
            if piece is not None and len(holders) < len(wanters):
                demands.append(Demand(names, piece, itemsize, wanters, holders, senders))
    return demands, holes


def _atoms(have: Shards) -> list[tuple[Box, list[int]]]:
    """Disjoint boxes, each with all ranks that hold the whole of it, in the order of the boxes."""
    held: dict[Box, list[int]] = defaultdict(list)
    for rank, boxes in have.items():
        for box in boxes:
            if box.numel:
                held[box].append(rank)
    distinct = sorted(held.items(), key=lambda item: (item[0].start, item[0].stop))
    if disjoint([box for box, _ in distinct]):
        return distinct
    atoms: list[tuple[Box, list[int]]] = []
    for box, ranks in distinct:
        rest, refined = [box], []
        for atom, owners in atoms:
            common = atom.intersect(box)
            if common is None:
                refined.append((atom, owners))
                continue
            refined.append((common, owners + ranks))
            refined += [(part, owners) for part in atom.minus(common)]
            rest = [part for one in rest for part in one.minus(common)]
        atoms = refined + [(part, list(ranks)) for part in rest]
    return sorted(atoms, key=lambda item: (item[0].start, item[0].stop))


def deal(demands: Sequence[Demand]) -> Iterator[Flow]:
    """Senders for every demand. One that a single rank holds has no choice; the others share what is left evenly."""
    open_demands: dict[tuple[int, ...], list[Demand]] = defaultdict(list)
    load: dict[int, float] = defaultdict(float)
    for demand in demands:
        if len(demand.senders) == 1:
            load[demand.senders[0]] += demand.nbytes
            yield Flow(
                demand.names,
                demand.box,
                demand.itemsize,
                demand.senders,
                demand.wanters,
                demand.holders,
            )
        else:
            open_demands[demand.senders].append(demand)
    quotas = balance({s: sum(d.nbytes for d in ds) for s, ds in open_demands.items()}, load)
    for senders, group in open_demands.items():
        even = max(quotas[senders]) - min(quotas[senders]) <= 1 + max(quotas[senders]) // 1000
        if even and all(d.count % len(senders) == 0 for d in group):
            for d in group:
                yield Flow(d.names, d.box, d.itemsize, senders, d.wanters, d.holders)
        else:
            yield from _deal_out(group, senders, quotas[senders])


def _deal_out(
    group: Sequence[Demand], senders: Sequence[int], quotas: Sequence[int]
) -> Iterator[Flow]:
    """Receiver by receiver, parameter by parameter; a box is cut only where a sender's quota ends."""
    nobody: frozenset[int] = frozenset()
    at, left = 0, quotas[0]

    def advance() -> None:
        nonlocal at, left
        while left <= 0 and at + 1 < len(senders):
            at += 1
            left += quotas[at]

    units = [
        (d, r) for d in group for r in d.wanters[~np.isin(d.wanters, list(d.holders))].tolist()
    ]
    units.sort(
        key=lambda unit: unit[1]
    )  # neighbours of a sender first: ranks of a node are consecutive
    for demand, receiver in units:
        one = demand.box.numel * demand.itemsize
        names, to = demand.names, np.array([receiver])
        while names:
            advance()
            last = at + 1 == len(senders)
            whole = len(names) if last else min(len(names), left // one)
            if whole:
                yield Flow(names[:whole], demand.box, demand.itemsize, (senders[at],), to, nobody)
                names, left = names[whole:], left - whole * one
                continue
            start = 0  # the box of names[0] is shared out
            while start < demand.box.numel:
                advance()
                room = (
                    demand.box.numel if at + 1 == len(senders) else max(left, 0) // demand.itemsize
                )
                stop = min(demand.box.numel, start + max(room, 1))
                for box in demand.box.flat_range(start, stop):
                    yield Flow(names[:1], box, demand.itemsize, (senders[at],), to, nobody)
                left -= (stop - start) * demand.itemsize
                start = stop
            names = names[1:]
