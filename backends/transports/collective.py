"""Batched point-to-point sends over torch.distributed (gloo, NCCL): nothing but the plan's bytes travels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from hybridflow.core.contracts.transport import Link, Pending, Transport


class Collective(Transport):
    """A plugin of kind "transport", name "collective"."""

    @classmethod
    def problem(cls, link: Link, config: Any = None) -> str | None:
        return None if link.grouped else "source and target are not in one process group"

    def start(self, outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, int]) -> Pending:
        group, at = self.link.group, {rank: i for i, rank in enumerate(self.link.ranks)}
        buffers = {
            s: torch.empty(n, dtype=torch.uint8, device=self.link.device)
            for s, n in incoming.items()
        }
        if not outgoing and not buffers:
            return _Works([], {})
        assert group is not None
        operations = [
            dist.P2POp(dist.irecv, b, group=group, group_peer=at[s]) for s, b in buffers.items()
        ]
        operations += [
            dist.P2POp(dist.isend, t, group=group, group_peer=at[r]) for r, t in outgoing.items()
        ]
        return _Works(dist.batch_isend_irecv(operations), buffers, list(outgoing.values()))


class _Works(Pending):
    def __init__(
        self, works: list, buffers: dict[int, torch.Tensor], kept: list[torch.Tensor] | None = None
    ):
        self._works, self._buffers, self._kept = works, buffers, kept

    def wait(self) -> dict[int, torch.Tensor]:
        for work in self._works:
            work.wait()
        self._kept = None
        return self._buffers
