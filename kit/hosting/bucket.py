"""Memory that a worker and its engine's process share, through which weights go piece by piece.

worker                                      engine's process
parameter -> Bucket.write -> [ memory ] -> Assembler.take -> parameter
                        list of Piece, over the socket
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import torch

BUCKET_BYTES = 32 << 20
"""Size of a bucket. A larger parameter goes over in several pieces."""
ALIGNED = 16
"""Pieces begin at multiples of this many bytes, so that views of any dtype are possible."""


@attrs.frozen
class Piece:
    """Consecutive elements of a flattened parameter, and where they are in the bucket."""

    name: str
    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    dtype: torch.dtype
    start: int
    """The first element of the flattened parameter."""
    count: int
    """The number of elements."""
    offset: int
    """Bytes from the beginning of the bucket."""


class Bucket:
    """The worker's side of the shared memory.

    On a CPU it is an anonymous file, which has no name that could be left behind; on a GPU it is
    memory that CUDA shares between processes.
    """

    def __init__(self, device: torch.device, nbytes: int = BUCKET_BYTES):
        self.device = device
        self.nbytes = nbytes
        self.fd = -1
        """The anonymous file's descriptor, which the other process inherits; -1 on a GPU."""
        self._pieces: list[Piece] = []
        self._filled = 0
        if device.type == "cuda":
            self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        else:
            self.fd = os.memfd_create("hybridflow-weights", os.MFD_CLOEXEC)
            os.ftruncate(self.fd, nbytes)
            self.memory = _mapped(self.fd, nbytes)

    def handle(self) -> Any:
        """Return what `open_bucket` opens the memory by in the other process; it is pickled."""
        if self.device.type == "cuda":
            # CUDA has handles of its own; a file is known by the inherited descriptor.
            from torch.multiprocessing.reductions import reduce_tensor

            return reduce_tensor(self.memory)
        return (self.fd, self.nbytes)

    def write(self, name: str, values: torch.Tensor) -> Iterator[list[Piece]]:
        """Add a parameter; yield the bucket's pieces each time that it is full.

        The reader must have taken them when the generator is advanced. What is added last stays in
        the bucket until `taken`.
        """
        flat = values.detach().reshape(-1)
        size = flat.element_size()
        start = 0
        while start < flat.numel():
            # Elements are never cut.
            room = (self.nbytes - self._filled) // size
            if not room:
                yield self.taken()
                continue

            part = flat[start : start + room]
            window = self.memory[self._filled : self._filled + part.nbytes]
            window.view(values.dtype).copy_(part)
            self._pieces.append(
                Piece(name, tuple(values.shape), values.dtype, start, part.numel(), self._filled)
            )
            # Rounded up to where the next piece may begin.
            self._filled += -(-part.nbytes // ALIGNED) * ALIGNED
            start += part.numel()

    def taken(self) -> list[Piece]:
        """Return the bucket's pieces, which the reader takes now, and start an empty bucket."""
        pieces = self._pieces
        self._pieces = []
        self._filled = 0
        return pieces

    def close(self) -> None:
        """Close the anonymous file. Safe to call twice."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def open_bucket(handle: Any) -> torch.Tensor:
    """Return the same memory in the engine's process, uint8 [bytes]."""
    if isinstance(handle[0], int):
        return _mapped(*handle)
    rebuild, arguments = handle
    return rebuild(*arguments)


def _mapped(fd: int, nbytes: int) -> torch.Tensor:
    """Return a file's bytes as a tensor, uint8 [nbytes]."""
    return torch.frombuffer(mmap.mmap(fd, nbytes), dtype=torch.uint8)


class Assembler:
    """The engine's side: it puts pieces together to whole parameters in memory of their own."""

    def __init__(self, memory: torch.Tensor):
        self.memory = memory
        self._open: dict[str, torch.Tensor] = {}

    def take(self, pieces: Sequence[Piece]) -> Iterator[tuple[str, torch.Tensor]]:
        """Copy pieces out of the bucket; yield (name, whole parameter) with each last piece."""
        for piece in pieces:
            # Pieces of a parameter come in order; with the first one it gets its memory.
            if piece.start == 0:
                self._open[piece.name] = torch.empty(
                    piece.shape, dtype=piece.dtype, device=self.memory.device
                )

            whole = self._open[piece.name]
            nbytes = piece.count * whole.element_size()
            window = self.memory[piece.offset : piece.offset + nbytes].view(piece.dtype)
            stop = piece.start + piece.count
            whole.view(-1)[piece.start : stop].copy_(window)
            # The last piece makes it whole.
            if stop == whole.numel():
                yield piece.name, self._open.pop(piece.name)
