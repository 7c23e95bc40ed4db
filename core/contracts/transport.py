"""The contract of weight transports, which carry a round's messages from rank to rank.

A round is a set of messages that are in flight together. Every rank calls `start` with its outgoing
messages and the sizes of the incoming ones, then `wait` on the Pending that it gets.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import attrs
import torch
import torch.distributed as dist

from hybridflow.core.contracts.capabilities import TransportCapabilities
from hybridflow.core.contracts.runtime import Store


@attrs.frozen(eq=False)
class Link:
    """A rank's connections to the others. Ranks are numbered as in the resharding plan."""

    # The ranks
    rank: int
    ranks: Sequence[int]
    """All ranks of the plan."""
    device: torch.device

    # Connections
    group: dist.ProcessGroup | None = None
    """A process group of all ranks, in this order; None between pools, and for one rank."""
    grouped: bool = True
    """Whether all ranks are in one process group (then `group` is it, or there is one rank)."""
    nodes: Mapping[int, str] = attrs.field(factory=dict)
    """Rank -> the node it runs on."""
    store: Store | None = None
    """The runtime's object store, where there is one."""

    @property
    def one_node(self) -> bool:
        """Whether all ranks run on one node."""
        return len(set(self.nodes.values())) <= 1


class PendingRound(ABC):
    """The messages of a round, on their way."""

    @abstractmethod
    def wait(self) -> dict[int, torch.Tensor]:
        """Return the received messages by sender: uint8 [n], on the link's device.

        They are valid until the next round's messages are waited for. Once it returns, the sent
        tensors may be changed.
        """


class Transport(ABC):
    """A plugin of kind "transport". All ranks of a link make the same calls in the same order."""

    crosses_pools: ClassVar[bool] = False
    """Whether it is a Mailbox, which needs no common process group."""
    serves_one_pool: ClassVar[bool] = True
    """Whether it connects ranks of one process group."""
    Config: ClassVar[type | None] = None
    """Its settings, a frozen attrs class; they are given beside its name in sync.transport. None:
    it has no settings."""
    capabilities: ClassVar[TransportCapabilities] = TransportCapabilities()
    """Capabilities of a plugin that is registered in one line; a Descriptor has its own."""

    def __init__(self, link: Link, config: Any = None):
        """`config`: an instance of its Config."""
        self.link = link
        self.config = config

    @classmethod
    def problem(cls, link: Link, config: Any = None) -> str | None:
        """Return why it cannot connect these ranks; None if it can."""
        return None

    @abstractmethod
    def start(
        self, outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, int]
    ) -> PendingRound:
        """Begin a round. At most two rounds are in flight at a time.

        outgoing: receiver -> message (uint8 [n], contiguous, on the device). Several receivers may
            share one tensor.
        incoming: sender -> number of bytes.
        """

    def close(self) -> None:  # noqa: B027
        """Release all resources; called after the last round of all ranks."""


class Mailbox(Transport):
    """A transport that leaves messages where receivers fetch them, without a process group.

        sender: put(message) -> ticket  ......  receiver: get(ticket) -> message
        sender: drop(ticket) once all have fetched it

    Within one process group the tickets travel over the group; between pools the controller
    carries them.
    """

    crosses_pools = True

    def __init__(self, link: Link, config: Any = None):
        super().__init__(link, config)
        self._left: list[list[Any]] = []
        """The tickets of this rank's messages that are not yet dropped, by round."""

    # --- what a subclass defines ---

    @abstractmethod
    def put(self, message: torch.Tensor) -> Any:
        """Leave a message; return a picklable ticket for those who fetch it."""

    @abstractmethod
    def get(self, ticket: Any, nbytes: int) -> torch.Tensor:
        """Return the message, uint8 [nbytes], on the link's device."""

    @abstractmethod
    def drop(self, ticket: Any) -> None:
        """Delete a message that this rank left, after all have fetched it."""

    # --- derived from these ---

    def post(self, outgoing: Mapping[int, torch.Tensor]) -> dict[int, Any]:
        """Leave a round's messages; return the tickets by receiver.

        A tensor that several receivers share is left once.
        """
        ticket_of: dict[int, Any] = {}  # by id() of the tensor
        tickets = {}
        for receiver, message in outgoing.items():
            if id(message) not in ticket_of:
                ticket_of[id(message)] = self.put(message)
            tickets[receiver] = ticket_of[id(message)]

        self._left.append(list(ticket_of.values()))
        return tickets

    def forget(self, keep: int = 0) -> None:
        """Drop the messages of all rounds but the last `keep`."""
        while len(self._left) > keep:
            for ticket in self._left.pop(0):
                self.drop(ticket)

    def start(
        self, outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, int]
    ) -> PendingRound:
        # Every rank sends its tickets to all others.
        tickets = self.post(outgoing)
        all_tickets: list[Any] = [None] * len(self.link.ranks)
        if self.link.group is not None:
            dist.all_gather_object(all_tickets, tickets, group=self.link.group)

        # All ranks have begun this round, and at most two are in flight: messages from before the
        # previous round have been fetched.
        self.forget(keep=2)

        # The ticket for this rank, from each sender.
        positions = {rank: i for i, rank in enumerate(self.link.ranks)}
        own_tickets = {
            sender: (all_tickets[positions[sender]][self.link.rank], nbytes)
            for sender, nbytes in incoming.items()
        }
        return _Fetch(self, own_tickets)

    def close(self) -> None:
        # No message is dropped before every rank has fetched its own.
        if self.link.group is not None and self._left:
            dist.barrier(group=self.link.group)
        self.forget()


@attrs.frozen
class _Fetch(PendingRound):
    """Messages that lie in a mailbox."""

    mailbox: Mailbox
    tickets: Mapping[int, tuple[Any, int]]
    """sender -> (ticket, number of bytes)."""

    def wait(self) -> dict[int, torch.Tensor]:
        return {
            sender: self.mailbox.get(ticket, nbytes)
            for sender, (ticket, nbytes) in self.tickets.items()
        }
