"""What the ranks of tests of Megatron's parts run; imports Megatron where it is used."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from hybridflow.core.contracts.worker import RankContext
from hybridflow.core.values.parallel import ParallelLayout

CPU = torch.device("cpu")


def groups_of(
    rank: int, world: int, layout: ParallelLayout, names: Sequence[str]
) -> dict[str, list[int]]:
    """The ranks of this rank's process groups."""
    from hybridflow.backends.megatron.groups import group_collection

    context = RankContext("actor", rank, layout, CPU)
    collection = group_collection(context)
    assert group_collection(context).tp is collection.tp  # made once
    return {name: dist.get_process_group_ranks(getattr(collection, name)) for name in names}
