"""Whether engines hold what trainers sent: checksums of wire values.

Checksums are additive modulo 2**64: that of a parameter is the sum of those of its boxes, however
the parameter is cut.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from hybridflow.core.contracts.rollout import RolloutEngine
from hybridflow.core.contracts.worker import EVERY_AXIS, RankContext
from hybridflow.core.resharding.exchange import ShardReader, checksum
from hybridflow.core.resharding.plan import ReshardPlan
from hybridflow.core.values.weights import Box

Sums = dict[tuple[str, int], int]
"""(parameter, receiver) -> the checksum of its wire values, modulo 2**64."""


@torch.no_grad()
def sums_sent(plan: ReshardPlan, rank: int, source: ShardReader) -> Sums:
    """Return the checksums of what a rank sends, and of what it keeps for itself."""
    # First what goes to other ranks, then what stays on this one.
    pieces = [
        (transfer.name, transfer.receiver, transfer.box) for transfer in plan.of_rank(rank)[0]
    ]
    pieces += [(name, rank, box) for name, box in plan.local(rank)]
    sums: Sums = Counter()
    for name, receiver, box in pieces:
        _add(sums, plan, name, receiver, box, source.read(plan.origin[name], box))
    return sums


@torch.no_grad()
def sums_held(plan: ReshardPlan, rank: int, engine: RolloutEngine) -> Sums:
    """Return the checksums of what a rank's engine holds."""
    # A rank may hold empty boxes, which nobody sends.
    sums: Sums = Counter()
    for name, boxes in plan.target.held.get(rank, {}).items():
        for box in boxes:
            if box.numel:
                _add(sums, plan, name, rank, box, engine.read(name, box))
    return sums


def _add(
    sums: Sums, plan: ReshardPlan, name: str, receiver: int, box: Box, values: torch.Tensor
) -> None:
    shape = plan.target.params[name].shape
    sums[name, receiver] += checksum(values.to(plan.wire[name]), box, shape)


def compare(every: Iterable[tuple[Sums, Sums]]) -> list[str]:
    """Return the names of parameters whose sums over all senders are not what their receivers hold.

    every: (sent, held) of each rank.
    """
    expected: Counter[tuple[str, int]] = Counter()
    actual: Sums = {}
    for sent, held in every:
        expected.update(sent)
        actual |= held  # a rank holds only what it receives, so keys of two ranks differ

    # Several receivers of a parameter may differ: its name is given once.
    wrong: dict[str, None] = {}
    for key, value in actual.items():
        if key not in expected or (value - expected[key]) % 2**64:
            wrong[key[0]] = None
    return list(wrong)


def differing(
    plan: ReshardPlan, context: RankContext, source: ShardReader, engine: RolloutEngine
) -> list[str]:
    """`compare` over the ranks of one process group.

    A collective call; every rank gets the same list.
    """
    own = (sums_sent(plan, context.rank, source), sums_held(plan, context.rank, engine))
    # A parameter's senders and receivers may be any ranks, so all sums are needed.
    every: list[Any] = [own]
    group = context.group(EVERY_AXIS)
    if group is not None:
        every = [None] * context.world_size
        dist.all_gather_object(every, own, group=group)
    return compare(every)
