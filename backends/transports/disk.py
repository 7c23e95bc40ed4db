"""Messages as files in a folder that all ranks see: slow, and works wherever nothing else does."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hybridflow.core.resharding.transport import Link, Mailbox


class Disk(Mailbox):
    """A plugin of kind "transport", name "disk"."""

    needs_folder = True

    @classmethod
    def problem(cls, link: Link) -> str | None:
        if link.folder is None:
            return "there is no folder that all ranks see; set sync.folder"
        return None if os.access(link.folder, os.W_OK) else f"{link.folder} is not a folder to write to"

    def put(self, message: torch.Tensor) -> Any:
        assert self.link.folder is not None
        path = Path(self.link.folder) / f"weights-{secrets.token_hex(8)}"
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
