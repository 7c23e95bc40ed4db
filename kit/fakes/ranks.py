"""Simulated ranks: one process is one rank of many, and its collectives move nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from hybridflow.core.contracts.worker import RankContext
from hybridflow.core.values.parallel import ParallelLayout


class FakeRank(RankContext):
    """The context of one rank whose peers are simulated."""

    def _reduce(self, values: Any, axis: str, op: Any) -> list[float]:
        """Return the values: the other ranks have none."""
        return list(values)


@contextlib.contextmanager
def fake_ranks(
    layout: ParallelLayout, device: torch.device, rank: int = 0, role: str = "actor"
) -> Iterator[FakeRank]:
    """Yield the context of one of the layout's ranks, in a process group without the others.

    A collective of this group returns at once, with any values.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    # Both kinds of devices have collectives.
    backend = f"cpu:fake,{device.type}:fake"
    dist.init_process_group(backend, store=FakeStore(), rank=rank, world_size=layout.world)
    # Collectives of this context return the rank's own values.
    try:
        yield FakeRank(role, rank, layout, device)
    finally:
        dist.destroy_process_group()
