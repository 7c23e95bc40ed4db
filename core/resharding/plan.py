"""The resharding planner: from any layout of weights to any other, each missing byte once, nothing that is held.

HybridFlow (arXiv:2409.19256) section 5, made general. Parameters that both sides cut alike form a class and are planned
once; a flow sends one box of such a class from the ranks that hold it to all the ranks that lack it. So a plan is as small
as the layouts are regular, and its transfers are listed only when they are asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property

import attrs
import numpy as np
import torch

from hybridflow.core.errors import HybridFlowError
from hybridflow.core.resharding.boxes import disjoint
from hybridflow.core.resharding.demands import Demand, common, deal, lacking
from hybridflow.core.resharding.flows import Flow, Transfer, Transfers
from hybridflow.core.values.weights import Box, Shards, WeightLayout

BUCKET_BYTES = 64 << 20


class ReshardError(HybridFlowError):
    """Two layouts that do not fit: every problem is listed, and nothing has moved."""


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
        figures = {
            key: np.zeros(size, np.int64)
            for key in ("source", "target", "common", "shared", "unused")
        }
        source, target = self.source.shards(), self.target.shards()
        for params, shards, key in (
            (self.source.params, source, "source"),
            (self.target.params, target, "target"),
        ):
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
                    shared = len(names) * common(mine, boxes)
                    figures["common"][rank] += shared * want.itemsize
                    figures["shared"][rank] += 0 if opaque else shared * want.itemsize
                    figures["unused"][rank] -= shared * have.itemsize
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
                sends += [
                    Transfer(name, flow.box, rank, to) for name in flow.names for to in targets
                ]
        return sends, receives


def plan_reshard(
    source: WeightLayout, target: WeightLayout, bucket_bytes: int = BUCKET_BYTES
) -> ReshardPlan:
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
    wanted: list[Demand] = []
    missing: list[str] = []
    for (_, itemsize, _, _), names in classes.items():
        found, holes = lacking(tuple(names), itemsize, have[origin[names[0]]], want[names[0]])
        wanted += found
        missing += [
            f"{name} {box} is wanted by rank {rank} and held by none"
            for name in names
            for box, rank in holes
        ]
    if missing:
        raise ReshardError(_listed("the source does not hold all that the target wants", missing))
    return ReshardPlan(source, target, bucket_bytes, tuple(deal(wanted)), wire, origin)


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
            problems.append(
                f"{name} has weights of its own in the source; the target ties it to {target.ties[name]}"
            )
        elif name not in target.params:
            problems.append(f"{name} {list(param.shape)} of the source is not in the target")
    if problems:
        raise ReshardError(_listed("the two layouts are not of one model", problems))
    return origin


def _listed(what: str, problems: list[str]) -> str:
    return (
        f"{what}; {len(problems)} problem{'s' * (len(problems) > 1)}, and nothing was moved:\n  "
        + "\n  ".join(problems)
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
                    not 0 <= a <= b <= n
                    for a, b, n in zip(box.start, box.stop, shape, strict=False)
                ):
                    problems.append(
                        f"{names[0]} {box} of rank {rank} does not lie in the shape {list(shape)}"
                    )
            if len(boxes) > 1 and not disjoint(boxes):
                problems.append(
                    f"{names[0]}: boxes of rank {rank} overlap: {', '.join(map(str, boxes))}"
                )
    if problems:
        raise ReshardError(_listed(f"the {side} layout is wrong", problems))
