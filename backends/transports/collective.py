"""Batched point-to-point sends over torch.distributed (gloo, NCCL).

Only the bytes of the resharding plan are sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from hybridflow.core.contracts.transport import Link, PendingRound, Transport


class Collective(Transport):
    """A plugin of kind "transport", name "collective"."""

    @classmethod
    def problem(cls, link: Link, config: Any = None) -> str | None:
        """Return a problem if the ranks are not in one process group."""
        return None if link.grouped else "source and target are not in one process group"

    def start(
        self, outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, int]
    ) -> PendingRound:
        """Post all sends and receives of a round as one batch."""
        buffers = {
            sender: torch.empty(nbytes, dtype=torch.uint8, device=self.link.device)
            for sender, nbytes in incoming.items()
        }
        # A round without messages of this rank; a single rank has no group at all.
        if not outgoing and not buffers:
            return _Works([], {})

        # The group numbers its ranks by their position in link.ranks.
        group = self.link.group
        assert group is not None
        positions = {rank: position for position, rank in enumerate(self.link.ranks)}
        operations = [
            dist.P2POp(dist.irecv, buffer, group=group, group_peer=positions[sender])
            for sender, buffer in buffers.items()
        ]
        operations += [
            dist.P2POp(dist.isend, message, group=group, group_peer=positions[receiver])
            for receiver, message in outgoing.items()
        ]

        works = dist.batch_isend_irecv(operations)
        return _Works(works, buffers, list(outgoing.values()))


class _Works(PendingRound):
    """A batch in flight, its receive buffers by sender, and the sent tensors.

    The sent tensors are kept until all sends are done, so that their memory is not reused.
    """

    def __init__(
        self,
        works: list,
        buffers: dict[int, torch.Tensor],
        kept: list[torch.Tensor] | None = None,
    ):
        self._works = works
        self._buffers = buffers
        self._kept = kept

    def wait(self) -> dict[int, torch.Tensor]:
        for work in self._works:
            work.wait()

        self._kept = None  # all sends are done too
        return self._buffers
