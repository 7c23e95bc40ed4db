"""The engines that others have, for comparison: whole parameters on every rank, then each slices what it generates with."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import attrs
import numpy as np

from hybridflow.core.resharding.flows import Flow
from hybridflow.core.resharding.plan import BUCKET_BYTES, ReshardPlan, plan_reshard
from hybridflow.core.values.weights import Box, WeightLayout


@attrs.frozen(eq=False, slots=False)
class GatherPlan(ReshardPlan):
    """A plan whose target is every whole parameter; `final` is what the ranks generate with."""

    final: WeightLayout

    @cached_property
    def bytes_redundant(self) -> dict[int, int]:
        """Bytes of the source that stand beside the generation shard."""
        return plan_reshard(self.source, self.final, self.bucket_bytes).bytes_redundant


def gather_plan(
    source: WeightLayout,
    target: WeightLayout,
    groups: Sequence[Sequence[int]],
    bucket_bytes: int = BUCKET_BYTES,
) -> GatherPlan:
    """Every rank of a group gets the whole model from the group's ranks, which hold all of it together.

    One group of all ranks is DeepSpeed-Chat's engine, a group for each training replica HybridFlow-V's (paper, table 2).
    Raises ReshardError as plan_reshard does.
    """
    flows: list[Flow] = []
    held = source.shards()
    plan = None
    for group in groups:
        members = set(group)
        mine = {
            name: {r: b for r, b in shards.items() if r in members} for name, shards in held.items()
        }
        plan = plan_reshard(
            WeightLayout.by_name(source.params, mine, group, source.ties),
            _whole(source, group),
            bucket_bytes,
        )
        flows += plan.flows
    assert plan is not None, "no groups"
    everyone = [rank for group in groups for rank in group]
    return GatherPlan(
        source, _whole(source, everyone), bucket_bytes, tuple(flows), plan.wire, plan.origin, target
    )


def _whole(source: WeightLayout, ranks: Sequence[int]) -> WeightLayout:
    shapes = {p.shape: dict.fromkeys(ranks, (Box.full(p.shape),)) for p in source.params.values()}
    return WeightLayout.by_name(
        source.params, {n: shapes[p.shape] for n, p in source.params.items()}, ranks, source.ties
    )


def lower_bound(source: WeightLayout, target: WeightLayout, rank: int) -> int:
    """|target \\ held| of a rank in wire bytes, straight from the boxes: what no plan can go below."""
    held, total = source.held.get(rank, {}), 0
    for name, boxes in target.held.get(rank, {}).items():
        origin = name if name in source.params else source.ties[name]
        size = min(source.params[origin].dtype.itemsize, target.params[name].dtype.itemsize)
        rest = [box for box in boxes if box.numel]
        for mine in held.get(origin, ()):
            rest = [part for one in rest for part in one.minus(mine)]
        total += size * int(np.sum([part.numel for part in rest], dtype=np.int64))
    return total
