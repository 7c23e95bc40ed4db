"""What the ranks of a gloo group run to have whole parameters."""

from __future__ import annotations

import torch
import torch.distributed as dist

from hybridflow.backends.fsdp import gather
from hybridflow.core.values.weights import Box

Boxes = dict[int, Box]


def gathered(
    rank: int,
    world: int,
    parameters: dict[str, tuple[torch.Tensor, Boxes]],
    bucket_bytes: int,
) -> list[tuple[str, torch.Tensor]]:
    """In the order in which they come; each rank begins with its boxes alone."""
    pieces = [
        gather.ShardedParameter(
            name, tuple(whole.shape), whole[boxes[rank].slices()].clone(), boxes
        )
        for name, (whole, boxes) in parameters.items()
    ]
    usual = gather.BUCKET_BYTES
    gather.BUCKET_BYTES = bucket_bytes
    try:
        found = gather.whole_parameters(pieces, range(world), dist.group.WORLD, torch.device("cpu"))
        return [(name, whole.clone()) for name, whole in found]
    finally:
        gather.BUCKET_BYTES = usual
