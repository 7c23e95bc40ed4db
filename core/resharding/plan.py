"""The resharding planner: each byte that a rank lacks is sent to it once, and no other.

It generalises HybridFlow (arXiv:2409.19256), section 5, to any two layouts. Parameters that both
sides cut alike form a class and are planned once. A flow sends one box of such a class from the
ranks that hold it to all the ranks that lack it. A plan is therefore small where the layouts are
regular, and its transfers are listed only when they are asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import attrs
import numpy as np
import torch

from hybridflow.core.errors import HybridFlowError
from hybridflow.core.resharding.boxes import disjoint
from hybridflow.core.resharding.demands import Demand, common, deal, lacking
from hybridflow.core.resharding.flows import Flow, Transfer, Transfers
from hybridflow.core.values.units import BUCKET_MB
from hybridflow.core.values.weights import Box, Shards, WeightLayout

BUCKET_BYTES = int(BUCKET_MB * 1e6)
"""Default bytes for all message buffers of a rank together."""


class ReshardError(HybridFlowError):
    """Two layouts do not match. The message lists every problem; nothing was moved."""


@attrs.frozen(eq=False, slots=False)
class ReshardPlan:
    """All transfers between two layouts, and their costs. Figures are bytes, indexed by rank."""

    # The request
    source: WeightLayout
    target: WeightLayout
    bucket_bytes: int
    """Limit of the bytes that a rank has in message buffers at a time."""

    # The result
    flows: tuple[Flow, ...]
    wire: Mapping[str, torch.dtype]
    """Target name -> the dtype that is sent: the narrower of the two sides."""
    origin: Mapping[str, str]
    """Target name -> the source's name of it (another one where the source ties it)."""

    @cached_property
    def ranks(self) -> list[int]:
        """All ranks of both sides, in order."""
        return sorted({*self.source.held, *self.target.held})

    @cached_property
    def transfers(self) -> Transfers:
        """Every single transfer of the plan, created when it is read."""
        return Transfers(self.flows)

    @cached_property
    def _size(self) -> int:
        """Length of an array indexed by rank."""
        return (self.ranks[-1] + 1) if self.ranks else 0

    @cached_property
    def _moved(self) -> tuple[np.ndarray, np.ndarray]:
        """Bytes received and bytes sent, int64 [rank] each."""
        received = np.zeros(self._size, np.int64)
        sent = np.zeros(self._size, np.int64)

        # Flows with one array of wanters are added up before numpy touches all these ranks.
        wanted: dict[int, list] = {}  # id(wanters) -> [wanters, bytes that each of them wants]
        for flow in self.flows:
            amount = flow.nbytes * len(flow.names)
            wanted.setdefault(id(flow.wanters), [flow.wanters, 0])[1] += amount
            for holder in flow.holders:
                received[holder] -= amount
            share = amount * (flow.count // len(flow.senders))
            if len(flow.senders) == 1:
                sent[flow.senders[0]] += share
            else:
                sent[list(flow.senders)] += share
        for wanters, amount in wanted.values():
            received[wanters] += amount
        return received, sent

    def _figure(self, values: np.ndarray) -> dict[int, int]:
        return {rank: int(values[rank]) for rank in self.ranks}

    @cached_property
    def bytes_received(self) -> dict[int, int]:
        """Bytes that each rank receives from others."""
        return self._figure(self._moved[0])

    @cached_property
    def bytes_sent(self) -> dict[int, int]:
        """Bytes that each rank sends to others."""
        return self._figure(self._moved[1])

    @cached_property
    def _held(self) -> dict[str, np.ndarray]:
        """Bytes of storage, int64 [rank] each.

        source, target: all of that side. common: elements on both sides, in the target's dtype.
        shared: those of `common` that can share one storage. unused: source elements that the
        rank's target does not have.
        """
        keys = ("source", "target", "common", "shared", "unused")
        figures = {key: np.zeros(self._size, np.int64) for key in keys}
        source = self.source.shards()
        target = self.target.shards()

        # Parameters with one Shards object, shape and dtype have the same figures.
        sides = ((self.source, source, "source"), (self.target, target, "target"))
        for layout, shards, key in sides:
            for names, held in _classes(layout.params, shards):
                amount = len(names) * layout.params[names[0]].dtype.itemsize
                for rank, boxes in held.items():
                    figures[key][rank] += amount * sum(box.numel for box in boxes)

        # Opaque parameters give no views, so that nothing can share their storage.
        for names, origin in self._pairs:
            have = self.source.params[origin].dtype
            want = self.target.params[names[0]].dtype
            held = source[origin]
            opaque = have != want or names[0] in self.target.opaque or origin in self.source.opaque
            for rank, boxes in target[names[0]].items():
                if mine := held.get(rank):
                    elements = len(names) * common(mine, boxes)
                    figures["common"][rank] += elements * want.itemsize
                    figures["shared"][rank] += 0 if opaque else elements * want.itemsize
                    figures["unused"][rank] -= elements * have.itemsize
        figures["unused"] += figures["source"]
        return figures

    @cached_property
    def _pairs(self) -> list[tuple[list[str], str]]:
        """Target names that are alike on both sides, with the source's name of one of them."""
        source = self.source.shards()
        target = self.target.shards()
        # Everything that the figures in _held depend on.
        classes: dict[tuple, tuple[list[str], str]] = {}
        for name, origin in self.origin.items():
            key = (
                id(source[origin]),
                id(target[name]),
                self.source.params[origin],
                self.target.params[name],
                name in self.target.opaque,
                origin in self.source.opaque,
            )
            classes.setdefault(key, ([], origin))[0].append(name)
        return list(classes.values())

    @cached_property
    def bytes_aliased(self) -> dict[int, int]:
        """Bytes of the target that can be views of the rank's own source: no copy is needed.

        Both sides have one dtype and give views of their storage.
        """
        return self._figure(self._held["shared"])

    @cached_property
    def bytes_local(self) -> dict[int, int]:
        """Bytes of the target that a rank has in its own source, as views or to be copied."""
        return self._figure(self._held["common"])

    @cached_property
    def bytes_redundant(self) -> dict[int, int]:
        """Bytes of the source that a rank's target does not use.

        This is the second copy that grouping avoids (arXiv:2409.19256, table 2).
        """
        return self._figure(self._held["unused"])

    @cached_property
    def peak_bytes(self) -> dict[int, int]:
        """Bytes of weights while both sides exist: aliased ones count once, buckets come on top."""
        held = self._held
        return self._figure(held["source"] + held["target"] - held["shared"])

    def local(self, rank: int) -> Iterator[tuple[str, Box]]:
        """Yield (target name, box) of the parts of the rank's target that its own source has."""
        # Boxes of both sides overlap in any way; each common part is one piece.
        held = self.source.held.get(rank, {})
        wanted = self.target.held.get(rank, {})
        for name, origin in self.origin.items():
            for box in wanted.get(name, ()):
                for mine in held.get(origin, ()):
                    if (shared := box.intersect(mine)) is not None:
                        yield name, shared

    def of_rank(self, rank: int) -> tuple[list[Transfer], list[Transfer]]:
        """Return the transfers that a rank sends and those that it receives."""
        sends = []
        receives = []
        for flow in self.flows:
            sender = flow.sender_of(rank)
            receivers = flow.receivers_of(rank)
            for name in flow.names:
                if sender is not None:
                    receives.append(Transfer(name, flow.box, sender, rank))
                sends += [Transfer(name, flow.box, rank, receiver) for receiver in receivers]
        return sends, receives


def plan_reshard(
    source: WeightLayout, target: WeightLayout, bucket_bytes: int = BUCKET_BYTES
) -> ReshardPlan:
    """Plan how every rank of `target` gets the boxes that it lacks from ranks of `source`.

    Both layouts number the same ranks: a rank in both is one process, whose own boxes are not sent.
    Every rank receives exactly the bytes of its target that its source lacks; senders are balanced
    over all ranks that hold a box; equal layouts give equal plans. Boxes that no target has are
    left out. Raises ReshardError with all mismatches.
    """
    if bucket_bytes < 1024:
        raise ReshardError(f"buckets must have at least 1,024 bytes, got {bucket_bytes}")

    # Values travel in the narrower of the two dtypes, and the wider side converts.
    origin = _match(source, target)
    wire = {}
    for name, source_name in origin.items():
        dtypes = (target.params[name].dtype, source.params[source_name].dtype)
        wire[name] = min(dtypes, key=lambda dtype: dtype.itemsize)
    have = source.shards()
    want = target.shards()
    _check_holdings(source, have, "source")
    _check_holdings(target, want, "target")

    # Parameters of one shape and wire itemsize, cut alike on both sides, are planned once.
    classes: dict[tuple, list[str]] = {}
    numbers: dict[int, int] = {}  # id(shards) -> its pattern's number; each is looked at once
    patterns: dict[tuple, int] = {}

    def pattern(shards: Shards) -> int:
        if id(shards) not in numbers:
            key = tuple(sorted((rank, boxes) for rank, boxes in shards.items() if boxes))
            numbers[id(shards)] = patterns.setdefault(key, len(patterns))
        return numbers[id(shards)]

    for name, source_name in origin.items():
        shape = source.params[source_name].shape
        key = (shape, wire[name].itemsize, pattern(have[source_name]), pattern(want[name]))
        classes.setdefault(key, []).append(name)

    # One parameter is planned for its class: all of them lack the same boxes.
    wanted: list[Demand] = []
    missing: list[str] = []
    for (_, itemsize, _, _), names in classes.items():
        shards = have[origin[names[0]]]
        demands, holes = lacking(tuple(names), itemsize, shards, want[names[0]])
        wanted += demands
        for name in names:
            for box, rank in holes:
                missing.append(f"{name} {box} is wanted by rank {rank} and held by none")
    if missing:
        raise ReshardError(_listed("the source does not hold all that the target wants", missing))
    return ReshardPlan(source, target, bucket_bytes, tuple(deal(wanted)), wire, origin)


def _match(source: WeightLayout, target: WeightLayout) -> dict[str, str]:
    """Return target name -> source name. Raises ReshardError where the models differ."""
    problems = []
    origin = {}
    for name, param in target.params.items():
        shape = list(param.shape)
        source_name = name if name in source.params else source.ties.get(name)
        if source_name is None:
            problems.append(f"{name} {shape} is not in the source")
            continue

        source_shape = source.params[source_name].shape
        if source_shape != param.shape:
            problems.append(f"{name} is {list(source_shape)} in the source, {shape} in the target")
        else:
            origin[name] = source_name

    # Parameters of the source that the target does not have.
    for name, param in source.params.items():
        if name in target.ties:
            problems.append(
                f"{name} has weights of its own in the source; "
                f"the target ties it to {target.ties[name]}"
            )
        elif name not in target.params:
            problems.append(f"{name} {list(param.shape)} of the source is not in the target")

    if problems:
        raise ReshardError(_listed("the two layouts are not of one model", problems))
    return origin


def _listed(summary: str, problems: list[str]) -> str:
    noun = "problem" if len(problems) == 1 else "problems"
    listed = "\n  ".join(problems)
    return f"{summary}; {len(problems)} {noun}, and nothing was moved:\n  {listed}"


def _classes(params: Mapping, shards: Mapping[str, Shards]) -> list[tuple[list[str], Shards]]:
    """Group the names that have one Shards object, shape and dtype; return each with its Shards."""
    classes: dict[tuple, list[str]] = {}
    for name, param in params.items():
        classes.setdefault((id(shards.get(name)), param), []).append(name)

    # A name without shards is held by no rank.
    held = [names for names in classes.values() if names[0] in shards]
    return [(names, shards[names[0]]) for names in held]


def _check_holdings(layout: WeightLayout, shards: Mapping[str, Shards], side: str) -> None:
    """Raise ReshardError unless boxes lie in their parameters and those of a rank are disjoint."""
    problems = []
    for names, held in _classes(layout.params, shards):
        shape = layout.params[names[0]].shape
        checked: set[tuple] = set()
        for rank, boxes in held.items():
            if boxes in checked:
                continue
            checked.add(boxes)  # ranks with the same boxes are checked once

            for box in boxes:
                if not _inside(box, shape):
                    problems.append(
                        f"{names[0]} {box} of rank {rank} does not lie in the shape {list(shape)}"
                    )
            if len(boxes) > 1 and not disjoint(boxes):
                listed = ", ".join(map(str, boxes))
                problems.append(f"{names[0]}: boxes of rank {rank} overlap: {listed}")
    if problems:
        raise ReshardError(_listed(f"the {side} layout is wrong", problems))


def _inside(box: Box, shape: Sequence[int]) -> bool:
    dims = zip(box.start, box.stop, shape, strict=False)
    inside = all(0 <= start <= stop <= size for start, stop, size in dims)
    return inside and len(box.start) == len(shape)
