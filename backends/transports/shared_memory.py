"""Messages in memory that the processes of one node share.

On CPUs a message is a file under /dev/shm, which receivers map; on GPUs it is the sender's tensor,
which receivers open by CUDA IPC. Files outlive a killed process: each sender holds a lock on its
files while it lives, and processes that start later remove the files without one.
"""

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
"""Prefix of the names of complete messages."""


class SharedMemory(Mailbox):
    """A plugin of kind "transport", name "shared_memory".

    A ticket is (path, None) on CPUs, and (key, the pair of reduce_tensor) on GPUs.
    """

    def __init__(self, link: Link, config: Any = None):
        super().__init__(link, config)
        self._lent: dict[str, torch.Tensor] = {}
        """The GPU tensors that receivers may still open, by key."""
        self._files: dict[str, int] = {}
        """Path -> file descriptor, locked for as long as this process lives."""
        sweep()

    @classmethod
    def problem(cls, link: Link, config: Any = None) -> str | None:
        """Return a problem for ranks on several nodes, and for nodes without /dev/shm."""
        if not link.one_node:
            return f"the ranks are on {len(set(link.nodes.values()))} nodes"
        return None if FOLDER.is_dir() or link.device.type == "cuda" else f"{FOLDER} is not there"

    def put(self, message: torch.Tensor) -> Any:
        """Leave a message. Raises OSError if /dev/shm is full."""
        if message.device.type == "cuda":
            return self._lend(message)

        path = self._write(message)
        return path, None

    def _lend(self, message: torch.Tensor) -> tuple[str, Any]:
        from torch.multiprocessing.reductions import reduce_tensor

        # The receiver's stream does not wait for ours, so the message must be complete now.
        torch.cuda.current_stream(message.device).synchronize()
        key = secrets.token_hex(8)
        self._lent[key] = message
        return key, reduce_tensor(message)

    def _write(self, message: torch.Tensor) -> str:
        """Write a message to a new file; return its path."""
        name = secrets.token_hex(8)
        path = FOLDER / f"{PREFIX}{name}"
        hidden = FOLDER / f".{PREFIX}{name}"
        descriptor = os.open(hidden, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            # With the space reserved, a full /dev/shm is an error here and not a SIGBUS later.
            os.posix_fallocate(descriptor, 0, message.numel())
            with mmap.mmap(descriptor, message.numel()) as memory:
                np.frombuffer(memory, np.uint8)[:] = message.numpy()

            # Locked before it gets the name by which other processes' `sweep` finds it.
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            hidden.rename(path)
        except OSError:
            os.close(descriptor)
            hidden.unlink(missing_ok=True)
            raise

        self._files[str(path)] = descriptor
        return str(path)

    def get(self, ticket: Any, nbytes: int) -> torch.Tensor:
        """Return a message in the sender's memory; on CPUs, writes to it stay in this process."""
        key, handle = ticket
        if handle is not None:
            # reduce_tensor's pair: a function, and the CUDA IPC handle among its arguments.
            rebuild, arguments = handle
            return rebuild(*arguments)

        # A private mapping: pages are copied when they are written to.
        with open(key, "rb") as file:
            memory = mmap.mmap(file.fileno(), nbytes, access=mmap.ACCESS_COPY)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def drop(self, ticket: Any) -> None:
        """Release a sent tensor, or delete a file and its lock."""
        key, handle = ticket
        if handle is not None:
            self._lent.pop(key, None)
        else:
            Path(key).unlink(missing_ok=True)
            os.close(self._files.pop(key))


def sweep() -> None:
    """Remove the files that killed processes have left: those without a lock."""
    for path in FOLDER.glob(f"{PREFIX}*"):
        # OSError: another user's file, removed by another process meanwhile, or locked.
        with contextlib.suppress(OSError), open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
