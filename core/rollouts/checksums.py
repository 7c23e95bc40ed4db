"""Whether engines hold what trainers sent: versions, and checksums of wire values.

Each side adds up the values of the same boxes, a 32nd of them or all, in the dtype in which they
travel (core/values/checksum.py). An engine also says which version brought a parameter, so that one
that never came is found whichever boxes were looked at.
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
"""Receiver -> what its engine holds."""


def sums_sent(plan: ReshardPlan, rank: int, source: ShardReader, part: int | None = None) -> Sums:
    """Return the checksums of what a rank sends, and of what it keeps for itself.

    `part` is that of a rotating proof, None everything.
    """
    # First what goes to other ranks, then what stays on this one.
    pieces = [
        (transfer.name, transfer.receiver, transfer.box) for transfer in plan.of_rank(rank)[0]
    ]
    pieces += [(name, rank, box) for name, box in plan.local(rank)]

    # A box that goes to several ranks is added up once.
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
    """Return what a rank's engine is asked to prove: all its parameters, and boxes of `part`."""
    # A rank may hold empty boxes, which nobody sends.
    return {
        name: (plan.wire[name], tuple(_looked_at(plan, name, boxes, part)))
        for name, boxes in plan.target.held.get(rank, {}).items()
        if any(box.numel for box in boxes)
    }


def _looked_at(
    plan: ReshardPlan, name: str, boxes: Iterable[Box], part: int | None
) -> Iterator[Box]:
    """Yield what lies in the part."""
    chosen = part_of(name, plan.target.params[name].shape, part)
    for box in boxes:
        common = box.intersect(chosen) if chosen is not None else None
        if common is not None:
            yield common


def compare(version: int, every: Iterable[tuple[Sums, Proofs]]) -> dict[str, str]:
    """Return parameters that are not what was sent, and what is wrong with each.

    every: (sent, held) of each rank. What an engine cannot read back is not compared.
    """
    expected: Counter[tuple[str, int]] = Counter()
    held: Proofs = {}
    for sent, proofs in every:
        expected.update(sent)
        held |= proofs  # each receiver speaks for itself

    # Several receivers of a parameter may differ: the first one is told of.
    wrong: dict[str, str] = {}
    for rank, proof in held.items():
        for name, (written, value) in proof.items():
            if written != version:
                of = "an earlier version" if written is None else f"version {written}"
                wrong.setdefault(name, f"rank {rank} has that of {of}")
            elif value is not None and (value - expected[name, rank]) % 2**64:
                wrong.setdefault(name, f"rank {rank} has other values")
    # What a rank should have and does not speak of
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
    """`compare` over the ranks of one process group; the engine was told what to expect.

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
