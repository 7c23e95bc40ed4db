"""Messages in shared memory: between processes of one node, on CPUs as a file under /dev/shm, on GPUs by CUDA IPC."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hybridflow.core.contracts.transport import Link, Mailbox

FOLDER = Path("/dev/shm")
PREFIX = "hybridflow-weights-"


class SharedMemory(Mailbox):
    """A plugin of kind "transport", name "shared_memory"."""

    def __init__(self, link: Link, config: Any = None):
        super().__init__(link, config)
        self._lent: dict[str, torch.Tensor] = {}
        self._files: dict[str, int] = {}
        """Path -> its descriptor, locked for as long as this process lives."""
        sweep()

    @classmethod
    def problem(cls, link: Link, config: Any = None) -> str | None:
        if not link.one_node:
            return f"the ranks are on {len(set(link.nodes.values()))} nodes"
        return None if FOLDER.is_dir() or link.device.type == "cuda" else f"{FOLDER} is not there"

    def put(self, message: torch.Tensor) -> Any:
        if message.device.type == "cuda":
            from torch.multiprocessing.reductions import reduce_tensor

            torch.cuda.current_stream(
                message.device
            ).synchronize()  # the reader's stream does not know ours
            key = secrets.token_hex(8)
            self._lent[key] = message
            return key, reduce_tensor(message)
        name = secrets.token_hex(8)
        path, made = FOLDER / f"{PREFIX}{name}", FOLDER / f".{PREFIX}{name}"
        descriptor = os.open(made, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            os.posix_fallocate(
                descriptor, 0, message.numel()
            )  # a full /dev/shm is an error here, not a SIGBUS later
            with mmap.mmap(descriptor, message.numel()) as memory:
                np.frombuffer(memory, np.uint8)[:] = message.numpy()
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # before it has the name that others sweep
            made.rename(path)
        except OSError:
            os.close(descriptor)
            made.unlink(missing_ok=True)
            raise
        self._files[str(path)] = descriptor
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
            os.close(self._files.pop(where))


def sweep() -> None:
    """Remove what processes that were killed have left: files that nobody holds a lock on."""
    for path in FOLDER.glob(f"{PREFIX}*"):
        with (
            contextlib.suppress(OSError),
            open(path, "rb") as file,
        ):  # of another user, gone meanwhile, or locked
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
