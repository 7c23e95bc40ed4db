"""One rank's part of a weight transfer between two pools, whose messages are fetched by tickets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hybridflow.core.contracts.runtime import Store
from hybridflow.core.contracts.transport import Link, Mailbox
from hybridflow.core.errors import HybridFlowError
from hybridflow.core.job.job import Chosen
from hybridflow.core.resharding.exchange import Exchange, Read, Write
from hybridflow.core.resharding.plan import ReshardPlan
from hybridflow.core.rollouts.transports import connect


class PoolSide:
    """A rank's end of the transfer, in the sending or in the receiving pool.

    In the plan's numbering the source's ranks come first, and the target's ranks after them.
    """

    def __init__(
        self,
        plan: ReshardPlan,
        rank: int,
        device: torch.device,
        nodes: Sequence[str],
        store: Store | None,
        transport: Chosen,
    ):
        """Connect to the other ranks.

        rank: in the plan's numbering; nodes: the node of each rank. Raises HybridFlowError when no
        transport reaches the other pool.
        """
        self.plan = plan
        self.exchange = Exchange(plan, rank, device)
        link = Link(
            rank, plan.ranks, device, grouped=False, nodes=dict(enumerate(nodes)), store=store
        )
        # Messages to another pool are left and fetched: no process group joins the two.
        mailbox = connect(transport, link)
        if not isinstance(mailbox, Mailbox):
            raise HybridFlowError(f"the transport {transport.name} does not reach another pool")
        self.mailbox = mailbox
        self.rank = rank

    def post(self, at: int, read: Read) -> dict[int, Any]:
        """Leave the messages of round `at`; return receiver -> ticket.

        Messages of rounds before the previous one are forgotten.
        """
        tickets = self.mailbox.post(self.exchange.pack_all(self.exchange.rounds[at], read))
        self.mailbox.forget(keep=2)  # this round, and the one that may still be fetched
        return tickets

    def fetch(self, at: int, tickets: Mapping[tuple[int, int], Any], write: Write) -> int:
        """Fetch the messages of round `at` and unpack them; return their bytes.

        tickets: (sender, receiver) -> ticket, of every rank.
        """
        # The plan has the ranks that have left messages for this one.
        received = 0
        for sender, message in self.exchange.rounds[at].receives.items():
            nbytes = self.exchange.message_bytes(message)
            values = self.mailbox.get(tickets[sender, self.rank], nbytes)
            self.exchange.unpack(message, values, write)
            received += nbytes
        return received
