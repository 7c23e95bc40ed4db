"""Messages in shared memory: between processes of one node, on CPUs as a file under /dev/shm, on GPUs by CUDA IPC."""

from __future__ import annotations

import mmap
import os
import secrets
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hybridflow.core.resharding.transport import Link, Mailbox

FOLDER = Path("/dev/shm")
PREFIX = "hybridflow-weights-"


class SharedMemory(Mailbox):
    """A plugin of kind "transport", name "shared_memory"."""

    def __init__(self, link: Link):
        super().__init__(link)
        self._lent: dict[str, torch.Tensor] = {}
        self._mapped: list[Any] = []

    @classmethod
    def problem(cls, link: Link) -> str | None:
        if not link.one_node:
            return f"the ranks are on {len(set(link.nodes.values()))} nodes"
        return None if FOLDER.is_dir() or link.device.type == "cuda" else f"{FOLDER} is not there"

    def put(self, message: torch.Tensor) -> Any:
        if message.device.type == "cuda":
            from torch.multiprocessing.reductions import reduce_tensor

            torch.cuda.current_stream(message.device).synchronize()  # the reader's stream does not know ours
            key = secrets.token_hex(8)
            self._lent[key] = message
            return key, reduce_tensor(message)
        path = FOLDER / f"{PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, message.numel())  # a full /dev/shm is an error here, not a SIGBUS later
            with mmap.mmap(descriptor, message.numel()) as memory:
                np.frombuffer(memory, np.uint8)[:] = message.numpy()
        except OSError:
            os.unlink(path)
            raise
        finally:
            os.close(descriptor)
        return str(path), None

    def get(self, ticket: Any, nbytes: int) -> torch.Tensor:
        where, handle = ticket
        if handle is not None:
            rebuild, arguments = handle
            return rebuild(*arguments)
        with open(where, "rb") as file:
            memory = mmap.mmap(file.fileno(), nbytes, access=mmap.ACCESS_COPY)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def drop(self, ticket: Any) -> None:
        where, handle = ticket
        if handle is not None:
            self._lent.pop(where, None)
        else:
            Path(where).unlink(missing_ok=True)
