"""Messages as files in a folder that all ranks see: slow, but needs no connection between ranks.

sender: write weights-XXXX.part, rename it to weights-XXXX  ....  receiver: read weights-XXXX
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch

from hybridflow.core.contracts.transport import Link, Mailbox


@attrs.frozen
class DiskConfig:
    """Settings of the transport "disk"."""

    folder: str
    """Folder that all ranks see, for example on a network file system."""


class Disk(Mailbox):
    """A plugin of kind "transport", name "disk". A ticket is a file's path."""

    Config = DiskConfig

    @classmethod
    def problem(cls, link: Link, config: Any = None) -> str | None:
        """Return a problem if no folder is set, or if this rank cannot write to it."""
        if config is None:
            return "there is no folder that all ranks see; set sync.transport.folder"

        writable = os.path.isdir(config.folder) and os.access(config.folder, os.W_OK)
        return None if writable else f"{config.folder} is not a folder to write to"

    def put(self, message: torch.Tensor) -> Any:
        """Write a message to a new file; return its path. Raises OSError, for example if full."""
        assert self.config is not None
        path = Path(self.config.folder) / f"weights-{secrets.token_hex(8)}"

        # A file that ends in .part is incomplete; without that it is a complete message.
        part = path.with_suffix(".part")
        try:
            message.cpu().numpy().tofile(part)
            part.rename(path)
        except OSError:
            part.unlink(missing_ok=True)
            raise
        return str(path)

    def get(self, ticket: Any, nbytes: int) -> torch.Tensor:
        """Read a message onto the link's device, uint8 [nbytes]."""
        array = np.fromfile(ticket, np.uint8, nbytes)
        return torch.from_numpy(array).to(self.link.device)

    def drop(self, ticket: Any) -> None:
        """Delete a message's file."""
        Path(ticket).unlink(missing_ok=True)
