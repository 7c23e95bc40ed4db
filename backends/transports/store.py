"""Messages as objects of the runtime's store, for engines in other pools and on other nodes."""

from __future__ import annotations

from typing import Any

import torch

from hybridflow.core.contracts.transport import Link, Mailbox
from hybridflow.core.groups.wire import Stored


class ObjectStore(Mailbox):
    """A plugin of kind "transport", name "store".

    A ticket is a Stored handle; the store frees the object when the ticket is forgotten.
    """

    serves_one_pool = False

    @classmethod
    def problem(cls, link: Link, config: Any = None) -> str | None:
        """Return a problem for ranks of one process group, and for runtimes without a store."""
        # Within a process group tickets do not pass through the controller, and such a ticket would
        # keep its object in the store for ever.
        if link.grouped:
            return (
                "it serves engines in a pool of their own; ranks of one process group have "
                "collective"
            )
        return None if link.store is not None else "the runtime gives the workers no object store"

    def put(self, message: torch.Tensor) -> Stored:
        """Leave a message in the store, in host memory."""
        assert self.link.store is not None

        return Stored(self.link.store.put([message.cpu().numpy()]))

    def get(self, ticket: Stored, nbytes: int) -> torch.Tensor:
        """Return a copy of a message, on the link's device."""
        assert self.link.store is not None
        (array,) = self.link.store.get(ticket.handle)

        # The store's memory is shared, so it must not be written to.
        return torch.from_numpy(array.copy()).to(self.link.device)

    def drop(self, ticket: Any) -> None:
        """Do nothing: the object is freed with the last ticket."""
