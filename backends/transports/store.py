"""Messages as objects of the runtime's store (Ray's object store): for engines in other pools, and on other nodes."""

from __future__ import annotations

from typing import Any

import torch

from hybridflow.core.contracts.transport import Link, Mailbox
from hybridflow.core.groups.wire import Stored


class ObjectStore(Mailbox):
    """A plugin of kind "transport", name "store". The store frees an object when its ticket is forgotten."""

    @classmethod
    def problem(cls, link: Link, config: Any = None) -> str | None:
        if (
            link.grouped
        ):  # a ticket that does not go by the controller would pin its object for ever
            return "it serves engines in a pool of their own; ranks of one process group have collective"
        return None if link.store is not None else "the runtime gives the workers no object store"

    def put(self, message: torch.Tensor) -> Stored:
        assert self.link.store is not None
        return Stored(self.link.store.put([message.cpu().numpy()]))

    def get(self, ticket: Stored, nbytes: int) -> torch.Tensor:
        assert self.link.store is not None
        (array,) = self.link.store.get(ticket.handle)
        return torch.from_numpy(array.copy()).to(
            self.link.device
        )  # the store's memory is shared: nobody may write to it

    def drop(self, ticket: Any) -> None:
        pass
