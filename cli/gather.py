"""Plans of the engines that resharding is compared with: they gather whole parameters.

Every rank of a group receives all of a parameter, then slices the part that it generates with
(arXiv:2409.19256, table 2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import attrs

from hybridflow.core.resharding.flows import Flow
from hybridflow.core.resharding.plan import BUCKET_BYTES, ReshardPlan, plan_reshard
from hybridflow.core.values.weights import Box, WeightLayout


@attrs.frozen(eq=False, slots=False)
class GatherPlan(ReshardPlan):
    """A plan that brings every rank whole parameters; `final` is the layout for generation."""

    final: WeightLayout

    @cached_property
    def bytes_redundant(self) -> dict[int, int]:
        """For each rank, bytes of the source that are not part of its generation shard."""
        return plan_reshard(self.source, self.final, self.bucket_bytes).bytes_redundant


def gather_plan(
    source: WeightLayout,
    target: WeightLayout,
    groups: Sequence[Sequence[int]],
    bucket_bytes: int = BUCKET_BYTES,
) -> GatherPlan:
    """Return the plan by which every rank of a group gets the whole model from the group's ranks.

    Together, the ranks of a group must hold the whole model. One group of all ranks is the method
    of DeepSpeed-Chat, a group for each training replica that of HybridFlow-V (arXiv:2409.19256,
    table 2). Raises ReshardError as plan_reshard does.
    """
    flows: list[Flow] = []
    held = source.shards()
    plan = None
    # A plan for each group, as if there were no other ranks.
    for group in groups:
        members = set(group)
        own = {name: _within(shards, members) for name, shards in held.items()}
        start = WeightLayout.by_name(source.params, own, group, source.ties)
        plan = plan_reshard(start, _whole(source, group), bucket_bytes)
        flows += plan.flows
    assert plan is not None, "no groups"

    # All of them together are one plan.
    everyone: list[int] = []
    for group in groups:
        everyone += group
    final = _whole(source, everyone)
    return GatherPlan(source, final, bucket_bytes, tuple(flows), plan.wire, plan.origin, target)


def _within(shards: Mapping[int, Any], members: set[int]) -> dict[int, Any]:
    """Return the shards of a parameter that these ranks hold."""
    return {rank: boxes for rank, boxes in shards.items() if rank in members}


def _whole(source: WeightLayout, ranks: Sequence[int]) -> WeightLayout:
    """Return the layout in which each of these ranks holds every parameter in full."""
    # Parameters of one shape share their boxes.
    by_shape = {
        param.shape: dict.fromkeys(ranks, (Box.full(param.shape),))
        for param in source.params.values()
    }
    shards = {name: by_shape[param.shape] for name, param in source.params.items()}
    return WeightLayout.by_name(source.params, shards, ranks, source.ties)
