"""Messages as files in a folder that all ranks see: slow, and works wherever nothing else does."""

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
    """A folder that all ranks see."""


class Disk(Mailbox):
    """A plugin of kind "transport", name "disk"."""

    Config = DiskConfig

    @classmethod
    def problem(cls, link: Link, config: Any = None) -> str | None:
        if config is None:
            return "there is no folder that all ranks see; set sync.transport.folder"
        writable = os.path.isdir(config.folder) and os.access(config.folder, os.W_OK)
        return None if writable else f"{config.folder} is not a folder to write to"

    def put(self, message: torch.Tensor) -> Any:
        assert self.config is not None
        path = Path(self.config.folder) / f"weights-{secrets.token_hex(8)}"
        part = path.with_suffix(".part")
        try:
            message.cpu().numpy().tofile(part)
            part.rename(path)  # a name without .part is a whole message
        except OSError:
            part.unlink(missing_ok=True)
            raise
        return str(path)

    def get(self, ticket: Any, nbytes: int) -> torch.Tensor:
        return torch.from_numpy(np.fromfile(ticket, np.uint8, nbytes)).to(self.link.device)

    def drop(self, ticket: Any) -> None:
        Path(ticket).unlink(missing_ok=True)
