"""The process groups of a role, created from its own layout.

Megatron's process-global groups stay unused.
"""

from __future__ import annotations

import functools
from typing import Any

import torch.distributed as dist

from hybridflow.core.contracts.worker import RankContext


def group_collection(context: RankContext) -> Any:
    """Return Megatron's ProcessGroupCollection for a role's ranks. A collective call.

    Context and expert parallelism are not used: cp and ep are groups of this rank alone, and their
    combinations with another axis are that axis's group.
    """
    from megatron.core.process_groups_config import ProcessGroupCollection

    # An axis of size 1 has no group in the context.
    alone = _alone(dist.get_rank(), dist.group.WORLD)
    tp = context.group("tp") or alone
    pp = context.group("pp") or alone
    dp = context.group("dp") or alone
    mp = context.group("pp-tp") or alone
    embd = alone if context.layout.pp == 1 else _ends(context) or alone
    return ProcessGroupCollection(
        # The axes, and the pipeline stages that share a tied embedding
        tp=tp,
        pp=pp,
        dp=dp,
        mp=mp,
        embd=embd,
        pos_embd=alone,
        # Without context parallelism
        cp=alone,
        tp_cp=tp,
        dp_cp=dp,
        intra_dp_cp=dp,
        # Without expert parallelism
        ep=alone,
        expt_tp=tp,
        expt_dp=dp,
        intra_expt_dp=dp,
        tp_ep=tp,
        tp_ep_pp=mp,
        # All ranks, over which the norm of sharded gradients is summed
        intra_dist_opt=_all(context, alone),
        tp_dp_cp=_all(context, alone),
    )


def _all(context: RankContext, alone: Any) -> Any:
    """Return the group of all ranks of the layout."""
    return dist.group.WORLD if context.layout.world > 1 else alone


@functools.cache
def _alone(rank: int, world: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a group of this rank only, made once per world."""
    return dist.new_group([rank], use_local_synchronization=True)


def _ends(context: RankContext) -> dist.ProcessGroup | None:
    """Return the group of this pipeline's first and last stage, which share a tied embedding.

    A pipeline stage between them gets None. The group is made once per context.
    """
    if "embd" not in context._groups:
        own = None
        # new_group is collective: every rank makes the groups of all pipelines.
        for stages in context.layout.groups("pp"):
            ends = [stages[0], stages[-1]]
            group = dist.new_group(ends)
            if context.rank in ends:
                own = group
        context._groups["embd"] = own
    return context._groups["embd"]
