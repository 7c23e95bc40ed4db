"""Whether what engines hold is what trainers sent: checksums of wire values that add up over shards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from hybridflow.core.contracts.rollout import RolloutEngine
from hybridflow.core.contracts.worker import EVERY_AXIS, RankContext
from hybridflow.core.resharding.exchange import Shards, checksum
from hybridflow.core.resharding.plan import ReshardPlan
from hybridflow.core.values.weights import Box

Sums = dict[tuple[str, int], int]
"""(parameter, receiver) -> the checksum of its wire values, modulo 2**64."""


@torch.no_grad()
def sums_sent(plan: ReshardPlan, rank: int, source: Shards) -> Sums:
    """Of what a rank sends, and of what it keeps for itself."""
    found: Sums = Counter()
    pieces = [(t.name, t.receiver, t.box) for t in plan.of_rank(rank)[0]]
    pieces += [(name, rank, box) for name, box in plan.local(rank)]
    for name, receiver, box in pieces:
        _add(found, plan, name, receiver, box, source.read(plan.origin[name], box))
    return found


@torch.no_grad()
def sums_held(plan: ReshardPlan, rank: int, engine: RolloutEngine) -> Sums:
    """Of what a rank's engine holds."""
    found: Sums = Counter()
    for name, boxes in plan.target.held.get(rank, {}).items():
        for box in boxes:
            if box.numel:
                _add(found, plan, name, rank, box, engine.read(name, box))
    return found


def _add(
    found: Sums, plan: ReshardPlan, name: str, receiver: int, box: Box, values: torch.Tensor
) -> None:
    found[name, receiver] += checksum(
        values.to(plan.wire[name]), box, plan.target.params[name].shape
    )


def compare(every: Iterable[tuple[Sums, Sums]]) -> list[str]:
    """Names of parameters whose sums over all senders are not what their receivers hold; of every rank (sent, held)."""
    expected: Counter[tuple[str, int]] = Counter()
    found: Sums = {}
    for sent, held in every:
        expected.update(sent)
        found |= held
    wrong = (
        key
        for key, value in found.items()
        if key not in expected or (value - expected[key]) % 2**64
    )
    return list(dict.fromkeys(name for name, _ in wrong))


def differing(
    plan: ReshardPlan, context: RankContext, source: Shards, engine: RolloutEngine
) -> list[str]:
    """`compare` over the ranks of one group. A collective call; every rank gets the same list."""
    mine = (sums_sent(plan, context.rank, source), sums_held(plan, context.rank, engine))
    every: list[Any] = [mine]
    group = context.group(EVERY_AXIS)
    if group is not None:
        every = [None] * context.world_size
        dist.all_gather_object(every, mine, group=group)
    return compare(every)
