"""Transports that are wrong in one way each, and two that are in several."""

from __future__ import annotations

import torch

from hybridflow.backends.transports.disk import Disk
from hybridflow.backends.transports.shared_memory import SharedMemory


class Truncates(Disk):
    """The last byte of a message does not arrive."""

    def get(self, ticket, nbytes):
        found = super().get(ticket, nbytes)
        found[-1] ^= 1
        return found


class ForgetsFiles(Disk):
    def drop(self, ticket):
        pass


class Unwilling(Disk):
    @classmethod
    def problem(cls, link, config=None):
        return "not today"


class WrongOnDisk(Truncates, ForgetsFiles, Unwilling):
    pass


class ReusesItsBuffer(SharedMemory):
    """All messages of a round end up in one buffer."""

    buffer = torch.empty(1 << 20, dtype=torch.uint8)

    def get(self, ticket, nbytes):
        self.buffer[:nbytes] = super().get(ticket, nbytes)
        return self.buffer[:nbytes]


class WrongInMemory(ReusesItsBuffer):
    """Forgets its messages, too."""

    def drop(self, ticket):
        pass
