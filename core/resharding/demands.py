"""Demands: the boxes that receivers lack. Each byte is sent once, by senders with even loads.

_atoms     source layout -> disjoint boxes, each with all ranks that hold it
lacking    target boxes cut at the atoms -> demands
deal       demands -> flows, with a sender for every receiver
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import attrs
import numpy as np

from hybridflow.core.resharding.balance import balance
from hybridflow.core.resharding.boxes import covers, disjoint, overlaps, subtract
from hybridflow.core.resharding.flows import Flow
from hybridflow.core.values.weights import Box, Shards


def common(mine: Sequence[Box], boxes: Sequence[Box]) -> int:
    """Return the number of elements that two lists of disjoint boxes share."""
    if boxes is mine or boxes == mine:
        return sum(box.numel for box in boxes)

    count = 0
    for box in boxes:
        for own in mine:
            shared = box.intersect(own)
            if shared is not None:
                count += shared.numel
    return count


@attrs.frozen(eq=False)
class Demand:
    """One box of a class of parameters (those that both layouts cut alike) that ranks lack."""

    names: tuple[str, ...]
    """The parameters of the class."""
    box: Box
    itemsize: int
    """Bytes per element on the wire."""
    wanters: np.ndarray
    """Ranks whose target has the box, sorted."""
    holders: frozenset[int]
    """The wanters whose source has the box already."""
    senders: tuple[int, ...]
    """All ranks whose source has the box, sorted."""

    @property
    def count(self) -> int:
        """Number of ranks that receive the box."""
        return len(self.wanters) - len(self.holders)

    @property
    def nbytes(self) -> int:
        """Bytes that all receivers get together."""
        return len(self.names) * self.box.numel * self.itemsize * self.count

    def flow(self) -> Flow:
        """Return the flow in which each sender serves an equal run of the receivers."""
        return Flow(self.names, self.box, self.itemsize, self.senders, self.wanters, self.holders)


def lacking(names: tuple[str, ...], itemsize: int, have: Shards, want: Shards):
    """Return the demands of a class, and (box, a rank that wants it) for boxes that no rank holds.

    `have` and `want` map ranks to their boxes in the source and in the target.
    """
    atoms = _atoms(have)
    boxes = [box for box, _ in atoms]
    owners = [(tuple(sorted(ranks)), frozenset(ranks)) for _, ranks in atoms]
    touching = overlaps(boxes)

    demands = []
    holes = []
    for box, ranks in _ranks_by_box(want):
        wanters = np.array(sorted(ranks))
        wanting = frozenset(ranks)
        indices = touching(box)
        pieces = [(box.intersect(boxes[i]), i) for i in indices]

        # Atoms are disjoint, so their pieces cover the box if they have as many elements.
        if sum(piece.numel for piece, _ in pieces if piece) != box.numel:
            held = [boxes[i] for i in indices]
            holes += [(hole, min(ranks)) for hole in covers(box, held)]
            continue

        # A piece that all its wanters hold already needs no transfer.
        for piece, i in pieces:
            senders, owner = owners[i]
            holders = owner & wanting
            if piece is not None and len(holders) < len(wanters):
                demands.append(Demand(names, piece, itemsize, wanters, holders, senders))
    return demands, holes


def _ranks_by_box(shards: Shards) -> list[tuple[Box, list[int]]]:
    """Return the distinct boxes with elements, each with the ranks that have it, in box order."""
    by_box: dict[Box, list[int]] = defaultdict(list)
    for rank, boxes in shards.items():
        for box in boxes:
            if box.numel:
                by_box[box].append(rank)
    return _sorted(by_box.items())


def _sorted(boxes) -> list[tuple[Box, list[int]]]:
    return sorted(boxes, key=lambda item: (item[0].start, item[0].stop))


def _atoms(have: Shards) -> list[tuple[Box, list[int]]]:
    """Return disjoint boxes, each with all ranks that hold it completely, in box order.

    Where boxes of different ranks overlap, they are cut along each other's edges:

        rank 0   [-------------]
        rank 1          [-------------]
        atoms    [-----][------][-----]      held by 0, by 0 and 1, by 1
    """
    distinct = _ranks_by_box(have)
    if disjoint([box for box, _ in distinct]):
        return distinct

    atoms: list[tuple[Box, list[int]]] = []
    for box, ranks in distinct:
        # Cut the box and every atom that it overlaps; `rest` is what no atom covers.
        rest = [box]
        refined = []
        for atom, owners in atoms:
            shared = atom.intersect(box)
            if shared is None:
                refined.append((atom, owners))
                continue
            refined.append((shared, owners + ranks))
            refined += [(part, owners) for part in atom.minus(shared)]
            rest = subtract(rest, shared)
        atoms = refined + [(part, list(ranks)) for part in rest]
    return _sorted(atoms)


def deal(demands: Sequence[Demand]) -> Iterator[Flow]:
    """Yield flows that meet every demand, with senders as evenly loaded as they can be."""
    # A box that a single rank holds leaves no choice; its bytes are a load to start from.
    open_demands: dict[tuple[int, ...], list[Demand]] = defaultdict(list)
    load: dict[int, float] = defaultdict(float)
    for demand in demands:
        if len(demand.senders) == 1:
            load[demand.senders[0]] += demand.nbytes
            yield demand.flow()
        else:
            open_demands[demand.senders].append(demand)

    open_bytes = {}
    for senders, group in open_demands.items():
        open_bytes[senders] = sum(demand.nbytes for demand in group)
    quotas = balance(open_bytes, load)

    # Where quotas are even (to a thousandth) and receivers divide evenly, flows stay in one piece.
    for senders, group in open_demands.items():
        most = max(quotas[senders])
        even = most - min(quotas[senders]) <= 1 + most // 1000
        if even and all(demand.count % len(senders) == 0 for demand in group):
            for demand in group:
                yield demand.flow()
        else:
            yield from _deal_out(group, senders, quotas[senders])


def _deal_out(
    group: Sequence[Demand], senders: Sequence[int], quotas: Sequence[int]
) -> Iterator[Flow]:
    """Yield flows to one receiver each, taking the senders in turn until their quotas are used up.

    A box is cut only where a sender's quota ends; the last sender takes the remaining bytes.
    """
    no_holders: frozenset[int] = frozenset()
    index = 0  # of the sender whose turn it is
    left = quotas[0]  # bytes that this sender still has to send

    def advance() -> None:
        nonlocal index, left
        while left <= 0 and index + 1 < len(senders):
            index += 1
            left += quotas[index]

    # Ranks of a node are consecutive, so in this order most messages stay within a node.
    units = []
    for demand in group:
        receivers = demand.wanters[~np.isin(demand.wanters, list(demand.holders))]
        units += [(demand, receiver) for receiver in receivers.tolist()]
    units.sort(key=lambda unit: unit[1])

    for demand, receiver in units:
        itemsize = demand.itemsize
        nbytes = demand.box.numel * itemsize
        names = demand.names
        target = np.array([receiver])
        while names:
            # Complete boxes of as many parameters as the sender's quota allows.
            advance()
            last = index + 1 == len(senders)
            count = len(names) if last else min(len(names), left // nbytes)
            if count:
                sender = (senders[index],)
                yield Flow(names[:count], demand.box, itemsize, sender, target, no_holders)
                names = names[count:]
                left -= count * nbytes
                continue

            # The quota ends within the box of names[0], which several senders share.
            start = 0
            while start < demand.box.numel:
                advance()
                last = index + 1 == len(senders)
                room = demand.box.numel if last else max(left, 0) // itemsize
                stop = min(demand.box.numel, start + max(room, 1))
                sender = (senders[index],)
                for box in demand.box.flat_range(start, stop):
                    yield Flow(names[:1], box, itemsize, sender, target, no_holders)
                left -= (stop - start) * itemsize
                start = stop
            names = names[1:]
