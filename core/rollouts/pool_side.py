"""One rank's part of a weight transfer between two pools: messages left, and fetched by tickets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hybridflow.core.contracts.runtime import Store
from hybridflow.core.contracts.transport import Link, Mailbox
from hybridflow.core.errors import HybridFlowError
from hybridflow.core.job.job import SyncSpec
from hybridflow.core.resharding.exchange import Exchange, Read, Write
from hybridflow.core.resharding.plan import plan_reshard
from hybridflow.core.rollouts.transports import connect
from hybridflow.core.values.weights import WeightLayout


class PoolSide:
    """One rank of either side. Source ranks come first in the plan's numbering, target ranks behind them."""

    def __init__(
        self, source: WeightLayout, target: WeightLayout, rank: int, device: torch.device, nodes: Sequence[str],
        store: Store | None, spec: SyncSpec,
    ):  # fmt: skip
        self.plan = plan_reshard(source, target, spec.bucket_bytes)
        self.exchange = Exchange(self.plan, rank, device)
        link = Link(
            rank,
            self.plan.ranks,
            device,
            grouped=False,
            nodes=dict(enumerate(nodes)),
            store=store,
        )
        mailbox = connect(spec, link)
        if not isinstance(mailbox, Mailbox):
            raise HybridFlowError(f"the transport {spec.transport} does not reach another pool")
        self.mailbox, self.rank = mailbox, rank

    def post(self, at: int, read: Read) -> dict[int, Any]:
        """Leave round `at`'s messages: receiver -> ticket. Those of the round before the last are forgotten."""
        tickets = self.mailbox.post(self.exchange.pack_all(self.exchange.rounds[at], read))
        self.mailbox.forget(keep=2)
        return tickets

    def fetch(self, at: int, tickets: Mapping[tuple[int, int], Any], write: Write) -> int:
        """Take round `at`'s messages from (sender, receiver) -> ticket; bytes."""
        moved = 0
        for sender, message in self.exchange.rounds[at].receives.items():
            nbytes = self.exchange.message_bytes(message)
            self.exchange.unpack(
                message, self.mailbox.get(tickets[sender, self.rank], nbytes), write
            )
            moved += nbytes
        return moved
