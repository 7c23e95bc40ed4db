"""Memory that a worker and its engine's process share, through which weights go box by box.

worker                                      engine's process
box -> Bucket.write -> [ memory ] -> BucketReader.take -> the engine's tensors
               Load (list of BucketEntry), over the socket

Each rank of a replica has a bucket of its own, on its own device.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from typing import Any

import attrs
import torch

from hybridflow.core.values.weights import Box
from hybridflow.kit.hosting.fence import Fence

ALIGNED = 16
"""Pieces begin at multiples of this many bytes, so that views of any dtype are possible."""


@attrs.frozen
class BucketEntry:
    """A box of a parameter, and the position of its values in the bucket, in row-major order."""

    name: str
    box: Box
    dtype: torch.dtype
    offset: int
    """Bytes from the beginning of the bucket."""

    def of(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the values as a view of the bucket's memory, of the box's shape."""
        nbytes = self.box.numel * self.dtype.itemsize
        return memory[self.offset : self.offset + nbytes].view(self.dtype).view(self.box.shape)


@attrs.frozen
class Load:
    """The contents of a bucket, as sent to its reader."""

    pieces: tuple[BucketEntry, ...]
    written: bytes | None = None
    """The handle of the event behind the writer's copies (see Fence)."""


class Bucket:
    """The worker's side of the shared memory.

    On a CPU it is an anonymous file, which has no name that could be left behind; on a GPU it is
    memory that CUDA shares between processes.
    """

    def __init__(self, device: torch.device, nbytes: int, fence: Fence | None = None):
        self.device = device
        self.nbytes = nbytes
        self.fence = fence or Fence(device)
        self.fd = -1
        """The anonymous file's descriptor; -1 on a GPU."""
        self._pieces: list[BucketEntry] = []
        self._filled = 0
        if device.type == "cuda":
            self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        else:
            self.fd = os.memfd_create("hybridflow-weights", os.MFD_CLOEXEC)
            os.ftruncate(self.fd, nbytes)
            self.memory = _mapped(self.fd, nbytes)

    def handle(self) -> Any:
        """Return a picklable handle by which a BucketReader opens the memory in another process."""
        if self.device.type == "cuda":
            # CUDA has handles of its own; a file is found through this process's descriptors.
            from torch.multiprocessing.reductions import reduce_tensor

            return reduce_tensor(self.memory)
        return (f"/proc/{os.getpid()}/fd/{self.fd}", self.nbytes)

    @torch.no_grad()
    def write(
        self, name: str, box: Box, values: torch.Tensor, dtype: torch.dtype
    ) -> Iterator[Load]:
        """Add a box in the reader's dtype; yield the bucket's contents each time that it is full.

        The reader must have taken them when the generator is advanced. The last pieces stay in the
        bucket until `taken`.
        """
        start = 0
        while start < box.numel:
            # Elements are never cut.
            room = (self.nbytes - self._filled) // dtype.itemsize
            if not room:
                yield self.taken()
                continue

            # As much as one box can hold: a part of a row, or whole rows.
            part = next(box.flat_range(start, min(start + room, box.numel)))
            piece = BucketEntry(name, part, dtype, self._filled)
            piece.of(self.memory).copy_(values[part.within(box)])
            self._pieces.append(piece)
            # Rounded up to where the next piece may begin.
            nbytes = part.numel * dtype.itemsize
            self._filled += -(-nbytes // ALIGNED) * ALIGNED
            start += part.numel

    def taken(self) -> Load:
        """Return the bucket's contents, which the reader takes now, and start an empty bucket."""
        load = Load(tuple(self._pieces), self.fence.record())
        self._pieces = []
        self._filled = 0
        return load

    def emptied(self, read: bytes | None) -> None:
        """Make later copies wait for the reader's; `read` is the handle from its `done`."""
        self.fence.wait(read)

    def close(self) -> None:
        """Close the anonymous file. Safe to call twice."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class BucketReader:
    """The engine's side of a bucket; the memory is opened with the first load."""

    def __init__(self, handle: Any, device: torch.device, fence: Fence | None = None):
        self.handle = handle
        self.fence = fence or Fence(device)
        self._memory: torch.Tensor | None = None

    @property
    def memory(self) -> torch.Tensor:
        """The same memory in this process, uint8 [bytes]."""
        if self._memory is None:
            self._memory = _opened(self.handle)
        return self._memory

    def take(self, load: Load) -> Iterator[tuple[BucketEntry, torch.Tensor]]:
        """Yield the pieces with their values, which are the bucket's own until `done`."""
        self.fence.wait(load.written)
        for piece in load.pieces:
            yield piece, piece.of(self.memory)

    def done(self) -> bytes | None:
        """Return the handle of the event behind this side's copies, for `Bucket.emptied`."""
        return self.fence.record()


def _opened(handle: Any) -> torch.Tensor:
    """Open a bucket's memory by its handle."""
    if not isinstance(handle[0], str):
        rebuild, arguments = handle
        return rebuild(*arguments)
    path, nbytes = handle
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return _mapped(fd, nbytes)
    finally:
        os.close(fd)


def _mapped(fd: int, nbytes: int) -> torch.Tensor:
    """Return a file's bytes as a tensor, uint8 [nbytes]."""
    return torch.frombuffer(mmap.mmap(fd, nbytes), dtype=torch.uint8)
