"""Memory that a worker and its engine's process share, through which weights go piece by piece."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import torch

BUCKET_BYTES = 32 << 20
"""Parameters go over in buckets of so many bytes; a larger one in pieces."""
ALIGNED = 16


@attrs.frozen
class Piece:
    """A part of a parameter, flattened: `count` elements from `start` on, at `offset` bytes of the bucket."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    count: int
    offset: int


class Bucket:
    """On a CPU an anonymous file, which has no name that could be left behind; on a GPU memory that CUDA shares."""

    def __init__(self, device: torch.device, nbytes: int = BUCKET_BYTES):
        self.device, self.nbytes = device, nbytes
        self.fd = -1
        self._pieces: list[Piece] = []
        self._filled = 0
        if device.type == "cuda":
            self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        else:
            self.fd = os.memfd_create("hybridflow-weights", os.MFD_CLOEXEC)
            os.ftruncate(self.fd, nbytes)
            self.memory = _mapped(self.fd, nbytes)

    def handle(self) -> Any:
        """What the other process opens it by."""
        if self.device.type == "cuda":
            from torch.multiprocessing.reductions import reduce_tensor

            return reduce_tensor(self.memory)
        return (self.fd, self.nbytes)

    def write(self, name: str, values: torch.Tensor) -> Iterator[list[Piece]]:
        """Add a parameter; yields what is in the bucket each time it must be emptied first."""
        flat = values.detach().reshape(-1)
        size, start = flat.element_size(), 0
        while start < flat.numel():
            room = (self.nbytes - self._filled) // size
            if not room:
                yield self.taken()
                continue
            part = flat[start : start + room]
            self.memory[self._filled : self._filled + part.nbytes].view(values.dtype).copy_(part)
            piece = Piece(
                name, tuple(values.shape), values.dtype, start, part.numel(), self._filled
            )
            self._pieces.append(piece)
            self._filled += -(-part.nbytes // ALIGNED) * ALIGNED
            start += part.numel()

    def taken(self) -> list[Piece]:
        """What is in the bucket, which the reader takes now: the bucket is empty for the next `write`."""
        pieces, self._pieces, self._filled = self._pieces, [], 0
        return pieces

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def open_bucket(handle: Any) -> torch.Tensor:
    """uint8 [bytes]: the same memory in the engine's process."""
    if isinstance(handle[0], int):
        return _mapped(*handle)
    rebuild, arguments = handle
    return rebuild(*arguments)


def _mapped(fd: int, nbytes: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(fd, nbytes), dtype=torch.uint8)


class Assembler:
    """In the engine's process: pieces become whole parameters, in memory of their own."""

    def __init__(self, memory: torch.Tensor):
        self.memory = memory
        self._open: dict[str, torch.Tensor] = {}

    def take(self, pieces: Sequence[Piece]) -> Iterator[tuple[str, torch.Tensor]]:
        for piece in pieces:
            if piece.start == 0:
                self._open[piece.name] = torch.empty(
                    piece.shape, dtype=piece.dtype, device=self.memory.device
                )
            whole = self._open[piece.name]
            nbytes = piece.count * whole.element_size()
            window = self.memory[piece.offset : piece.offset + nbytes].view(piece.dtype)
            whole.view(-1)[piece.start : piece.start + piece.count].copy_(window)
            if piece.start + piece.count == whole.numel():
                yield piece.name, self._open.pop(piece.name)
