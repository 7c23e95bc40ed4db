"""The contract of weight transports: how a round's messages get from rank to rank."""

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
    """What a rank has to reach the others by. Ranks are the plan's."""

    rank: int
    ranks: Sequence[int]
    """All ranks of the plan."""
    device: torch.device
    group: dist.ProcessGroup | None = None
    """A process group of all of them, in this order; None between pools, and for one rank."""
    grouped: bool = True
    """Whether all ranks are in one group (then `group` is it, or there is one rank)."""
    nodes: Mapping[int, str] = attrs.field(factory=dict)
    """Rank -> the node it runs on."""
    store: Store | None = None
    """The runtime's object store, where there is one."""

    @property
    def one_node(self) -> bool:
        return len(set(self.nodes.values())) <= 1


class Pending(ABC):
    """Messages on their way."""

    @abstractmethod
    def wait(self) -> dict[int, torch.Tensor]:
        """The received messages by sender: uint8 [n], on the link's device, good until the next round's are waited for.

        After it the sent tensors may be changed.
        """


class Transport(ABC):
    """A plugin of kind "transport". All ranks of a link make the same calls in the same order."""

    crosses_pools: ClassVar[bool] = False
    """Whether it is a Mailbox, which needs no common process group."""
    Config: ClassVar[type | None] = None
    """Its settings, a frozen attrs class; they stand beside its name in sync.transport. None: it has none."""
    capabilities: ClassVar[TransportCapabilities] = TransportCapabilities()
    """Of a plugin that is registered in one line; a Descriptor has its own."""

    def __init__(self, link: Link, config: Any = None):
        """`config`: an instance of its Config."""
        self.link, self.config = link, config

    @classmethod
    def problem(cls, link: Link, config: Any = None) -> str | None:
        """Why it cannot serve these ranks; None if it can."""
        return None

    @abstractmethod
    def start(self, outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, int]) -> Pending:
        """Begin a round. outgoing: receiver -> message (uint8 [n], contiguous, on the device; several receivers may share
        one tensor); incoming: sender -> bytes. Up to two rounds are under way at a time."""

    def close(self) -> None:  # noqa: B027
        """Give up what is held; after the last round of all ranks."""


class Mailbox(Transport):
    """A transport that leaves messages where receivers fetch them: no process group is needed to move bytes.

    Within one group the tickets go over the group; between pools the controller carries them.
    """

    crosses_pools = True

    def __init__(self, link: Link, config: Any = None):
        super().__init__(link, config)
        self._left: list[list[Any]] = []

    @abstractmethod
    def put(self, message: torch.Tensor) -> Any:
        """Leave a message; a ticket (picklable) for those who fetch it."""

    @abstractmethod
    def get(self, ticket: Any, nbytes: int) -> torch.Tensor:
        """The message, uint8 [nbytes], on the link's device."""

    @abstractmethod
    def drop(self, ticket: Any) -> None:
        """Forget a message that this rank left, after all have fetched it."""

    def post(self, outgoing: Mapping[int, torch.Tensor]) -> dict[int, Any]:
        """Leave a round's messages: receiver -> ticket. A tensor that several receivers share is left once."""
        made: dict[int, Any] = {}
        tickets = {}
        for receiver, message in outgoing.items():
            if id(message) not in made:
                made[id(message)] = self.put(message)
            tickets[receiver] = made[id(message)]
        self._left.append(list(made.values()))
        return tickets

    def forget(self, keep: int = 0) -> None:
        """Drop the messages of all rounds but the last `keep`."""
        while len(self._left) > keep:
            for ticket in self._left.pop(0):
                self.drop(ticket)

    def start(self, outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, int]) -> Pending:
        tickets = self.post(outgoing)
        every: list[Any] = [None] * len(self.link.ranks)
        if self.link.group is not None:
            dist.all_gather_object(every, tickets, group=self.link.group)
        # All ranks have begun this round, so they have ended the one before the last: two are under way at most.
        self.forget(keep=2)
        at = {rank: i for i, rank in enumerate(self.link.ranks)}
        return _Fetch(self, {s: (every[at[s]][self.link.rank], n) for s, n in incoming.items()})

    def close(self) -> None:
        if self.link.group is not None and self._left:
            dist.barrier(group=self.link.group)
        self.forget()


class _Fetch(Pending):
    def __init__(self, mailbox: Mailbox, tickets: Mapping[int, tuple[Any, int]]):
        self._mailbox, self._tickets = mailbox, tickets

    def wait(self) -> dict[int, torch.Tensor]:
        return {
            sender: self._mailbox.get(ticket, n) for sender, (ticket, n) in self._tickets.items()
        }
