"""The process groups of a role, made of its own layout: Megatron's process-global ones stay unused."""

from __future__ import annotations

import functools
from typing import Any

import torch.distributed as dist

from hybridflow.core.contracts.worker import RankContext


def group_collection(context: RankContext) -> Any:
    """Megatron's ProcessGroupCollection for a RankContext. Collective."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    alone = _alone(dist.get_rank(), dist.group.WORLD)
    tp, pp, dp, mp = (context.group(axis) or alone for axis in ("tp", "pp", "dp", "pp-tp"))
    embd = alone if context.layout.pp == 1 else _ends(context) or alone
    return ProcessGroupCollection(
        tp=tp, pp=pp, dp=dp, mp=mp, cp=alone, tp_cp=tp, dp_cp=dp, intra_dp_cp=dp, intra_dist_opt=_all(context, alone),
        ep=alone, expt_tp=tp, expt_dp=dp, intra_expt_dp=dp, tp_ep=tp, tp_ep_pp=mp, embd=embd, pos_embd=alone,
        tp_dp_cp=_all(context, alone),
    )  # fmt: skip


def _all(context: RankContext, alone: Any) -> Any:
    return dist.group.WORLD if context.layout.world > 1 else alone


@functools.cache
def _alone(rank: int, world: dist.ProcessGroup) -> dist.ProcessGroup:
    return dist.new_group([rank], use_local_synchronization=True)


def _ends(context: RankContext) -> dist.ProcessGroup | None:
    """First and last stage of this rank's pipeline, which share a tied embedding; None of a stage between them."""
    if "embd" not in context._groups:
        mine = None
        for stages in context.layout.groups("pp"):
            ends = [stages[0], stages[-1]]
            group = dist.new_group(ends)
            if context.rank in ends:
                mine = group
        context._groups["embd"] = mine
    return context._groups["embd"]
