"""Checks that engines hold the weights that trainers sent: versions, and checksums of wire values.

Each side computes checksums of the same boxes, a 32nd of them or all, in the dtype in which they
are sent (core/values/checksum.py). An engine also states the version of each parameter, so that one
that never arrived is found even if its boxes are not among the compared ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from hybridflow.core.contracts.rollout import Proof, RolloutEngine, Wanted
from hybridflow.core.contracts.worker import EVERY_AXIS, RankContext
from hybridflow.core.errors import HybridFlowError
from hybridflow.core.resharding.exchange import ShardReader
from hybridflow.core.resharding.plan import ReshardPlan
from hybridflow.core.values.checksum import checksum, part_of, totals
from hybridflow.core.values.weights import Box

Sums = dict[tuple[str, int], int]
"""(parameter, receiver) -> the checksum of its wire values, modulo 2**64."""
Proofs = dict[int, Proof]
"""Receiver -> the proof of its engine."""


def sums_sent(plan: ReshardPlan, rank: int, source: ShardReader, part: int | None = None) -> Sums:
    """Return the checksums of the boxes that a rank sends, or copies to its own engine.

    `part` is that of a rotating proof, None everything.
    """
    # First the boxes for other ranks, then those that stay on this one.
    pieces = [
        (transfer.name, transfer.receiver, transfer.box) for transfer in plan.of_rank(rank)[0]
    ]
    pieces += [(name, rank, box) for name, box in plan.local(rank)]

    # The checksum of a box for several ranks is computed once.
    receivers: dict[tuple[str, Box], list[int]] = {}
    for name, receiver, box in pieces:
        for common in _looked_at(plan, name, (box,), part):
            receivers.setdefault((name, common), []).append(receiver)

    def sums() -> Iterator[tuple[tuple[str, int], torch.Tensor]]:
        for (name, box), ranks in receivers.items():
            values = source.read(plan.origin[name], box)
            value = checksum(values.to(plan.wire[name]), box)
            for receiver in ranks:
                yield (name, receiver), value

    return totals(sums())


def wanted(plan: ReshardPlan, rank: int, part: int | None = None) -> Wanted:
    """Return the request for a rank's proof: all its parameters, with their boxes of `part`."""
    # A rank may hold empty boxes, which are not sent.
    return {
        name: (plan.wire[name], tuple(_looked_at(plan, name, boxes, part)))
        for name, boxes in plan.target.held.get(rank, {}).items()
        if any(box.numel for box in boxes)
    }


def _looked_at(
    plan: ReshardPlan, name: str, boxes: Iterable[Box], part: int | None
) -> Iterator[Box]:
    """Yield the intersections of boxes with part `part` of the parameter."""
    chosen = part_of(name, plan.target.params[name].shape, part)
    for box in boxes:
        common = box.intersect(chosen) if chosen is not None else None
        if common is not None:
            yield common


def compare(version: int, every: Iterable[tuple[Sums, Proofs]]) -> dict[str, str]:
    """Return the parameters that differ from the sent ones, each with a description.

    every: (sent, held) of each rank. Values that an engine cannot read back are not compared.
    """
    expected: Counter[tuple[str, int]] = Counter()
    held: Proofs = {}
    for sent, proofs in every:
        expected.update(sent)
        held |= proofs  # each receiver has its own proof

    # If several receivers of a parameter differ, the first one is reported.
    wrong: dict[str, str] = {}
    for rank, proof in held.items():
        for name, (written, value) in proof.items():
            if written != version:
                of = "an earlier version" if written is None else f"version {written}"
                wrong.setdefault(name, f"rank {rank} has that of {of}")
            elif value is not None and (value - expected[name, rank]) % 2**64:
                wrong.setdefault(name, f"rank {rank} has other values")
    # Parameters that should be in a rank's proof and are not
    for name, rank in expected:
        if rank in held and name not in held[rank]:
            wrong.setdefault(name, f"rank {rank} has no such parameter")
    return wrong


def differing(
    plan: ReshardPlan,
    context: RankContext,
    source: ShardReader,
    engine: RolloutEngine,
    version: int,
    part: int | None = None,
) -> dict[str, str]:
    """Return `compare` over the ranks of one process group; the engine knows the wanted boxes.

    A collective call; every rank gets the same answer, or raises where one fails.
    """
    own: Any = None
    failure: Exception | None = None
    try:
        sent = sums_sent(plan, context.rank, source, part)
        own = (sent, {context.rank: engine.proof()})
    except Exception as error:
        failure = error

    # A parameter's senders and receivers may be any ranks, so all sums are needed.
    every: list[Any] = [own]
    group = context.group(EVERY_AXIS)
    if group is not None:
        every = [None] * context.world_size
        dist.all_gather_object(every, own, group=group)
    if failure is not None:
        raise failure
    if None in every:
        raise HybridFlowError(f"the proof of weights of version {version} failed on another rank")
    return compare(version, every)
