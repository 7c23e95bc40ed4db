"""Order between two processes that work on one piece of GPU memory.

A GPU runs its work asynchronously, so a message through a socket does not order memory accesses.
Each side records an event after its work and sends the event's handle along; the other side's
stream waits for it before it touches the memory:

    writer                          reader
    copy in, record, send handle -> wait, copy out, record
    wait, copy in, ...           <- send handle

On a CPU a copy has ended when the call returns, and no handle is needed.
"""

from __future__ import annotations

from typing import Any

import torch


class Fence:
    """One side's event, and the events of the other side that it has seen."""

    def __init__(self, device: torch.device, cuda: Any = torch.cuda):
        """`cuda` has `Event` and `current_stream`, as torch.cuda does."""
        self.device = device
        self.cuda = cuda
        self._own: Any = None
        self._others: dict[bytes, Any] = {}

    def record(self) -> bytes | None:
        """Record an event after the queued work of this side's stream; return its handle."""
        if self.device.type != "cuda":
            return None
        if self._own is None:
            self._own = self.cuda.Event(interprocess=True)
        self._own.record(self.cuda.current_stream(self.device))
        return self._own.ipc_handle()

    def wait(self, handle: bytes | None) -> None:
        """Let this side's stream wait for the other side's event."""
        if handle is None:
            return
        # The other side records the same event again and again: its handle does not change.
        if handle not in self._others:
            self._others[handle] = self.cuda.Event.from_ipc_handle(self.device, handle)
        self.cuda.current_stream(self.device).wait_event(self._others[handle])
