"""The resharding planner: from any layout of weights to any other, each missing byte once, nothing that is held.

HybridFlow (arXiv:2409.19256) section 5, made general. Parameters that both sides cut alike form a class and are planned
once; a flow sends one box of such a class from the ranks that hold it to all the ranks that lack it. So a plan is as small
as the layouts are regular, and its transfers are listed only when they are asked for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import attrs
import numpy as np
import torch

from hybridflow.core.errors import HybridFlowError
from hybridflow.core.resharding.balance import balance
from hybridflow.core.resharding.boxes import covers, disjoint, overlaps
from hybridflow.core.values.weights import Box, Shards, WeightLayout

BUCKET_BYTES = 64 << 20


class ReshardError(HybridFlowError):
    """Two layouts that do not fit: every problem is listed, and nothing has moved."""


@attrs.frozen
class Transfer:
    """One box of one parameter, from one rank to another."""

    name: str
    box: Box
    sender: int
    receiver: int


@attrs.frozen(eq=False)
class Flow:
    """One box of the parameters `names`, from its senders to `receivers` (sorted): an equal run of receivers for each."""

    names: tuple[str, ...]
    box: Box
    itemsize: int
    senders: tuple[int, ...]
    wanters: np.ndarray
    """Ranks whose target has the box."""
    holders: frozenset[int]
    """Those of them that have it already."""

    @property
    def nbytes(self) -> int:
        """Of one parameter, for one receiver."""
        return self.box.numel * self.itemsize

    @property
    def receivers(self) -> np.ndarray:
        if not self.holders:
            return self.wanters
        return self.wanters[~np.isin(self.wanters, list(self.holders), assume_unique=True)]

    @property
    def count(self) -> int:
        return len(self.wanters) - len(self.holders)

    def pairs(self) -> Iterator[tuple[int, int]]:
        """(sender, receiver)."""
        share = self.count // len(self.senders)
        for at, receiver in enumerate(self.receivers.tolist()):
            yield self.senders[at // share], receiver

    def sender_of(self, rank: int) -> int | None:
        """Who sends to `rank`, or None when it is no receiver."""
        if rank in self.holders:
            return None
        at = int(np.searchsorted(self.wanters, rank))
        if at == len(self.wanters) or self.wanters[at] != rank:
            return None
        if len(self.senders) == 1:
            return self.senders[0]
        at -= sum(1 for holder in self.holders if holder < rank)
        return self.senders[at // (self.count // len(self.senders))]

    def receivers_of(self, rank: int) -> list[int]:
        if rank not in self.senders:
            return []
        share, at = self.count // len(self.senders), self.senders.index(rank)
        return self.receivers[at * share : (at + 1) * share].tolist()


class Transfers(Sequence[Transfer]):
    """All transfers of a plan, made as they are read; a plan of thousands of ranks has millions."""

    def __init__(self, flows: Sequence[Flow]):
        self._flows = flows
        self._ends = np.cumsum([len(f.names) * f.count for f in flows], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __iter__(self) -> Iterator[Transfer]:
        for flow in self._flows:
            pairs = list(flow.pairs())
            for name in flow.names:
                for sender, receiver in pairs:
                    yield Transfer(name, flow.box, sender, receiver)

    def __getitem__(self, at):
        if isinstance(at, slice):
            return list(self)[at]
        if at < 0:
            at += len(self)
        if not 0 <= at < len(self):
            raise IndexError(at)
        which = int(np.searchsorted(self._ends, at, side="right"))
        flow = self._flows[which]
        name, pair = divmod(int(at - (self._ends[which - 1] if which else 0)), flow.count)
        sender, receiver = list(flow.pairs())[pair]
        return Transfer(flow.names[name], flow.box, sender, receiver)


@attrs.frozen(eq=False, slots=False)
class ReshardPlan:
    """Who sends what to whom, and what it costs; figures are bytes, indexed by rank."""

    source: WeightLayout
    target: WeightLayout
    bucket_bytes: int
    flows: tuple[Flow, ...]
    wire: Mapping[str, torch.dtype]
    """Target name -> the dtype that travels: the narrower of the two sides."""
    origin: Mapping[str, str]
    """Target name -> the source's name of it (another one where the source ties it)."""

    @cached_property
    def ranks(self) -> list[int]:
        return sorted({*self.source.held, *self.target.held})

    @cached_property
    def transfers(self) -> Transfers:
        return Transfers(self.flows)

    @cached_property
    def _moved(self) -> tuple[np.ndarray, np.ndarray]:
        size = (self.ranks[-1] + 1) if self.ranks else 0
        received, sent = np.zeros(size, np.int64), np.zeros(size, np.int64)
        whole: dict[int, list] = {}  # id(wanters) -> [wanters, bytes that all of them want]
        for flow in self.flows:
            amount = flow.nbytes * len(flow.names)
            whole.setdefault(id(flow.wanters), [flow.wanters, 0])[1] += amount
            for holder in flow.holders:
                received[holder] -= amount
            share = amount * (flow.count // len(flow.senders))
            if len(flow.senders) == 1:
                sent[flow.senders[0]] += share
            else:
                sent[list(flow.senders)] += share
        for wanters, amount in whole.values():
            received[wanters] += amount
        return received, sent

    def _figure(self, values: np.ndarray) -> dict[int, int]:
        return {rank: int(values[rank]) for rank in self.ranks}

    @cached_property
    def bytes_received(self) -> dict[int, int]:
        return self._figure(self._moved[0])

    @cached_property
    def bytes_sent(self) -> dict[int, int]:
        return self._figure(self._moved[1])

    @cached_property
    def _held(self) -> dict[str, np.ndarray]:
        """Bytes per rank of: source storage, target storage, and what both have (in each side's own bytes)."""
        size = (self.ranks[-1] + 1) if self.ranks else 0
        figures = {key: np.zeros(size, np.int64) for key in ("source", "target", "common", "shared", "unused")}
        source, target = self.source.shards(), self.target.shards()
        for params, shards, key in ((self.source.params, source, "source"), (self.target.params, target, "target")):
            for names, _ in _classes(params, shards):
                amount = len(names) * params[names[0]].dtype.itemsize
                for rank, boxes in shards[names[0]].items():
                    figures[key][rank] += amount * sum(b.numel for b in boxes)
        for names, origin in self._pairs:
            have, want = self.source.params[origin].dtype, self.target.params[names[0]].dtype
            held, wanted = source[origin], target[names[0]]
            opaque = have != want or names[0] in self.target.opaque or origin in self.source.opaque
            for rank, boxes in wanted.items():
                if mine := held.get(rank):
                    common = len(names) * _common(mine, boxes)
                    figures["common"][rank] += common * want.itemsize
                    figures["shared"][rank] += 0 if opaque else common * want.itemsize
                    figures["unused"][rank] -= common * have.itemsize
        figures["unused"] += figures["source"]
        return figures

    @cached_property
    def _pairs(self) -> list[tuple[list[str], str]]:
        """Target names of one class, and a source name of it."""
        source, target = self.source.shards(), self.target.shards()
        classes: dict[tuple, tuple[list[str], str]] = {}
        for name, origin in self.origin.items():
            key = (id(source[origin]), id(target[name]), self.source.params[origin], self.target.params[name],
                   name in self.target.opaque, origin in self.source.opaque)  # fmt: skip
            classes.setdefault(key, ([], origin))[0].append(name)
        return list(classes.values())

    @cached_property
    def bytes_aliased(self) -> dict[int, int]:
        """Bytes of the target that a rank has in its source, with one dtype and a view on both sides: no copy is needed."""
        return self._figure(self._held["shared"])

    @cached_property
    def bytes_local(self) -> dict[int, int]:
        """Bytes of the target that a rank has in its source, aliased or to be copied within the rank."""
        return self._figure(self._held["common"])

    @cached_property
    def bytes_redundant(self) -> dict[int, int]:
        """Bytes of the source that a rank's target does not use: the second copy that grouping avoids (paper, table 2)."""
        return self._figure(self._held["unused"])

    @cached_property
    def peak_bytes(self) -> dict[int, int]:
        """Live weight storage while both sides stand: source and target, what is aliased counted once. Buckets come on top."""
        held = self._held
        return self._figure(held["source"] + held["target"] - held["shared"])

    def local(self, rank: int) -> Iterator[tuple[str, Box]]:
        """What the rank's target takes from its own source."""
        held, wanted = self.source.held.get(rank, {}), self.target.held.get(rank, {})
        for name, origin in self.origin.items():
            for box in wanted.get(name, ()):
                for mine in held.get(origin, ()):
                    if (common := box.intersect(mine)) is not None:
                        yield name, common

    def of_rank(self, rank: int) -> tuple[list[Transfer], list[Transfer]]:
        """(what it sends, what it receives)."""
        sends, receives = [], []
        for flow in self.flows:
            sender = flow.sender_of(rank)
            for name in flow.names:
                if sender is not None:
                    receives.append(Transfer(name, flow.box, sender, rank))
            if targets := flow.receivers_of(rank):
                sends += [Transfer(name, flow.box, rank, to) for name in flow.names for to in targets]
        return sends, receives

    def explain(self, limit: int = 16) -> str:
        """The figures as a table, one line for each rank (up to `limit`), and the most loaded ranks."""
        from hybridflow.cli.explain import explain

        return explain(self, limit)


def plan_reshard(source: WeightLayout, target: WeightLayout, bucket_bytes: int = BUCKET_BYTES) -> ReshardPlan:
    """Plan how every rank of `target` gets the boxes that it lacks from ranks of `source` that hold them.

    Ranks are of one numbering: a rank in both layouts is one process, whose own boxes do not travel. Received bytes are
    |target \\ held| on every rank; senders are balanced over all that hold a box; equal layouts give equal plans. What
    the source has and nobody wants is left out. Raises ReshardError, with everything that does not fit.
    """
    if bucket_bytes < 1024:
        raise ReshardError(f"buckets must have at least 1,024 bytes, got {bucket_bytes}")
    origin = _match(source, target)
    wire = {
        name: min(target.params[name].dtype, source.params[of].dtype, key=lambda d: d.itemsize)
        for name, of in origin.items()
    }
    have, want = source.shards(), target.shards()
    _check_holdings(source, have, "source")
    _check_holdings(target, want, "target")
    classes: dict[tuple, list[str]] = {}
    seen: dict[int, int] = {}
    patterns: dict[tuple, int] = {}

    def pattern(shards: Shards) -> int:
        if id(shards) not in seen:
            key = tuple(sorted((rank, boxes) for rank, boxes in shards.items() if boxes))
            seen[id(shards)] = patterns.setdefault(key, len(patterns))
        return seen[id(shards)]

    for name, of in origin.items():
        key = (source.params[of].shape, wire[name].itemsize, pattern(have[of]), pattern(want[name]))
        classes.setdefault(key, []).append(name)
    demands: list[Demand] = []
    missing: list[str] = []
    for (_, itemsize, _, _), names in classes.items():
        found, holes = _demands(tuple(names), itemsize, have[origin[names[0]]], want[names[0]])
        demands += found
        missing += [f"{name} {box} is wanted by rank {rank} and held by none" for name in names for box, rank in holes]
    if missing:
        raise ReshardError(_listed("the source does not hold all that the target wants", missing))
    return ReshardPlan(source, target, bucket_bytes, tuple(_deal(demands)), wire, origin)


def _match(source: WeightLayout, target: WeightLayout) -> dict[str, str]:
    problems, origin = [], {}
    for name, param in target.params.items():
        of = name if name in source.params else source.ties.get(name)
        if of is None:
            problems.append(f"{name} {list(param.shape)} is not in the source")
        elif source.params[of].shape != param.shape:
            problems.append(
                f"{name} is {list(source.params[of].shape)} in the source, {list(param.shape)} in the target"
            )
        else:
            origin[name] = of
    for name, param in source.params.items():
        if name in target.ties:
            problems.append(f"{name} has weights of its own in the source; the target ties it to {target.ties[name]}")
        elif name not in target.params:
            problems.append(f"{name} {list(param.shape)} of the source is not in the target")
    if problems:
        raise ReshardError(_listed("the two layouts are not of one model", problems))
    return origin


def _listed(what: str, problems: list[str]) -> str:
    return f"{what}; {len(problems)} problem{'s' * (len(problems) > 1)}, and nothing was moved:\n  " + "\n  ".join(
        problems
    )


def _classes(params: Mapping, shards: Mapping[str, Shards]) -> list[tuple[list[str], Shards]]:
    """Names with one Shards object, shape and dtype."""
    found: dict[tuple, list[str]] = {}
    for name, param in params.items():
        found.setdefault((id(shards.get(name)), param), []).append(name)
    return [(names, shards[names[0]]) for names in found.values() if names[0] in shards]


def _check_holdings(layout: WeightLayout, shards: Mapping[str, Shards], side: str) -> None:
    """Boxes lie inside the parameter, and a rank's boxes do not overlap."""
    problems = []
    for names, held in _classes(layout.params, shards):
        shape = layout.params[names[0]].shape
        checked: set[tuple] = set()
        for rank, boxes in held.items():
            if boxes in checked:
                continue
            checked.add(boxes)
            for box in boxes:
                if len(box.start) != len(shape) or any(
                    not 0 <= a <= b <= n for a, b, n in zip(box.start, box.stop, shape, strict=False)
                ):
                    problems.append(f"{names[0]} {box} of rank {rank} does not lie in the shape {list(shape)}")
            if len(boxes) > 1 and not disjoint(boxes):
                problems.append(f"{names[0]}: boxes of rank {rank} overlap: {', '.join(map(str, boxes))}")
    if problems:
        raise ReshardError(_listed(f"the {side} layout is wrong", problems))


def _common(mine: Sequence[Box], boxes: Sequence[Box]) -> int:
    """Elements that two lists of disjoint boxes share."""
    if boxes is mine or boxes == mine:
        return sum(b.numel for b in boxes)
    return sum(common.numel for box in boxes for own in mine if (common := box.intersect(own)) is not None)


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


def _demands(names: tuple[str, ...], itemsize: int, have: Shards, want: Shards):
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


def _deal(demands: Sequence[Demand]) -> Iterator[Flow]:
    """Senders for every demand. One that a single rank holds has no choice; the others share what is left evenly."""
    open_demands: dict[tuple[int, ...], list[Demand]] = defaultdict(list)
    load: dict[int, float] = defaultdict(float)
    for demand in demands:
        if len(demand.senders) == 1:
            load[demand.senders[0]] += demand.nbytes
            yield Flow(demand.names, demand.box, demand.itemsize, demand.senders, demand.wanters, demand.holders)
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


def _deal_out(group: Sequence[Demand], senders: Sequence[int], quotas: Sequence[int]) -> Iterator[Flow]:
    """Receiver by receiver, parameter by parameter; a box is cut only where a sender's quota ends."""
    nobody: frozenset[int] = frozenset()
    at, left = 0, quotas[0]

    def advance() -> None:
        nonlocal at, left
        while left <= 0 and at + 1 < len(senders):
            at += 1
            left += quotas[at]

    units = [(d, r) for d in group for r in d.wanters[~np.isin(d.wanters, list(d.holders))].tolist()]
    units.sort(key=lambda unit: unit[1])  # neighbours of a sender first: ranks of a node are consecutive
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
                room = demand.box.numel if at + 1 == len(senders) else max(left, 0) // demand.itemsize
                stop = min(demand.box.numel, start + max(room, 1))
                for box in demand.box.flat_range(start, stop):
                    yield Flow(names[:1], box, demand.itemsize, (senders[at],), to, nobody)
                left -= (stop - start) * demand.itemsize
                start = stop
            names = names[1:]
