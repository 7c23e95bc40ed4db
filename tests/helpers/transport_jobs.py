"""What ranks run in the tests of single transports, and links without a process group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from hybridflow.backends.transports.collective import Collective
from hybridflow.core.contracts.transport import Link


def link(rank: int, **given: Any) -> Link:
    """Of one of three ranks on the CPU of one node, without a process group."""
    here = dict.fromkeys(range(3), "here")
    return Link(rank, [0, 1, 2], torch.device("cpu"), **{"nodes": here, **given})


def message(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.uint8)


Messages = dict[tuple[int, int], list[int]]
"""(sender, receiver) -> bytes."""


def rounds(rank: int, world: int, sent: list[Messages]) -> list[dict[int, list[int]]]:
    """What a rank gets in each round, by sender. All rounds begin before the first is waited for."""
    mine = Collective(Link(rank, list(range(world)), torch.device("cpu"), dist.group.WORLD))
    pending = []
    for messages in sent:
        outgoing = {to: message(*values) for (by, to), values in messages.items() if by == rank}
        incoming = {by: len(values) for (by, to), values in messages.items() if to == rank}
        pending.append(mine.start(outgoing, incoming))
    return [{by: found.tolist() for by, found in each.wait().items()} for each in pending]
