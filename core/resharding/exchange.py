"""Runs a plan on one rank: its rounds are packed, sent, received and unpacked.

The next round is packed and sent before the one in flight is unpacked (see rounds).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import attrs
import torch

from hybridflow.core.contracts.transport import PendingRound, Transport
from hybridflow.core.processes import page
from hybridflow.core.resharding.plan import ReshardError, ReshardPlan
from hybridflow.core.resharding.rounds import (
    IN_FLIGHT,
    Message,
    RankRound,
    plan_rounds,
    rank_rounds,
)
from hybridflow.core.values.weights import Box, Shard

Read = Callable[[str, Box], torch.Tensor]
"""(source name, box) -> the values, a view where possible; they may have any dtype and strides."""
Write = Callable[[str, Box, torch.Tensor], object]
"""(target name, box, values in wire dtype): copy them into the target."""


@attrs.define
class Moved:
    """Figures of one rank's part of an exchange."""

    bytes_received: int = 0
    bytes_sent: int = 0
    """Sizes of the sent buffers: exactly the bytes that are transferred."""
    messages: int = 0
    """Number of messages sent."""
    peak_buffer_bytes: int = 0
    """The most bytes in messages at a time, over the rounds in flight: at most bucket_bytes."""
    seconds: float = 0.0


class Exchange:
    """The rounds of one rank, computed once for a plan and run at every sync."""

    def __init__(self, plan: ReshardPlan, rank: int, device: torch.device):
        self.plan = plan
        self.rank = rank
        self.device = device
        self.rounds: list[RankRound] = rank_rounds(plan, plan_rounds(plan), rank)

    def message_bytes(self, message: Message) -> int:
        """Return the length of a message's buffer."""
        return sum(box.numel * self.plan.wire[name].itemsize for name, box in message)

    def run(self, transport: Transport, read: Read, write: Write) -> Moved:
        """Run all rounds.

        An error of `read` or `write` is raised after the last round, since the other ranks wait for
        this rank's messages in every round.
        """
        moved = Moved()
        started = time.perf_counter()
        failure: Exception | None = None
        under_way: list[tuple[PendingRound, RankRound, int]] = []
        held = 0  # bytes in the messages of these rounds

        def finish() -> None:
            """Wait for the oldest round in flight and unpack it."""
            nonlocal failure, held
            pending, oldest, size = under_way.pop(0)
            with page.doing(page.PEERS):
                received = pending.wait()
            try:
                if failure is None:
                    for sender, message in oldest.receives.items():
                        self.unpack(message, received[sender], write)
            except Exception as error:
                failure = error
            held -= size

        # Send each round before the oldest one is unpacked, so that one is always in flight.
        for one in self.rounds:
            try:
                outgoing = self.pack_all(one, read)
            except Exception as error:
                # Zeros are sent instead, so that no rank waits for ever. All ranks learn of the
                # failure before the update ends, and engines generate only after its end.
                failure = failure or error
                outgoing = {peer: self._zeros(message) for peer, message in one.sends.items()}

            incoming = {peer: self.message_bytes(message) for peer, message in one.receives.items()}
            incoming_bytes = sum(incoming.values())
            # Equal messages share a buffer, which takes memory once.
            distinct = {id(buffer): buffer.numel() for buffer in outgoing.values()}
            size = sum(distinct.values()) + incoming_bytes
            under_way.append((transport.start(outgoing, incoming), one, size))

            # Counted while the round is in flight.
            held += size
            moved.peak_buffer_bytes = max(moved.peak_buffer_bytes, held)
            moved.bytes_received += incoming_bytes
            moved.bytes_sent += sum(buffer.numel() for buffer in outgoing.values())
            moved.messages += len(outgoing)
            if len(under_way) == IN_FLIGHT:
                finish()
        while under_way:
            finish()

        # A rank that failed to pack or unpack gets here too, so that none is left waiting.
        transport.close()
        moved.seconds = time.perf_counter() - started
        if failure is not None:
            raise failure
        return moved

    def _zeros(self, message: Message) -> torch.Tensor:
        return torch.zeros(self.message_bytes(message), dtype=torch.uint8, device=self.device)

    def pack_all(self, one: RankRound, read: Read) -> dict[int, torch.Tensor]:
        """Return receiver -> packed message; equal messages are packed once and share a buffer."""
        buffers: dict[Message, torch.Tensor] = {}
        for message in one.sends.values():
            if message not in buffers:
                buffers[message] = self.pack(message, read)
        return {receiver: buffers[message] for receiver, message in one.sends.items()}

    @torch.no_grad()
    def pack(self, message: Message, read: Read) -> torch.Tensor:
        """Return the message's values as uint8 [bytes].

        A single piece that is contiguous and in wire dtype is not copied.
        """
        if len(message) == 1:
            # A message of one piece may be sent from its storage.
            name, box = message[0]
            values = read(self.plan.origin[name], box)
            wire = values.dtype == self.plan.wire[name]
            if wire and values.is_contiguous() and values.device == self.device:
                return values.detach().reshape(-1).view(torch.uint8)

        buffer = torch.empty(self.message_bytes(message), dtype=torch.uint8, device=self.device)
        for (name, box), values in self._views(message, buffer):
            values.copy_(read(self.plan.origin[name], box))
        return buffer

    @torch.no_grad()
    def unpack(self, message: Message, buffer: torch.Tensor, write: Write) -> None:
        """Write every piece of a received message, uint8 [bytes], to its target."""
        for (name, box), values in self._views(message, buffer):
            write(name, box, values)

    def _views(
        self, message: Message, buffer: torch.Tensor
    ) -> Iterable[tuple[tuple[str, Box], torch.Tensor]]:
        """Yield (name, box) and the part of the buffer that holds its values, in wire dtype."""
        start = 0
        for name, box in message:
            dtype = self.plan.wire[name]
            end = start + box.numel * dtype.itemsize
            yield (name, box), buffer[start:end].view(dtype).view(box.shape)
            start = end


class ShardReader:
    """A rank's source shards; reads the values of any box within one of them."""

    def __init__(self, shards: Iterable[tuple[str, Box, Shard]]):
        self._of: dict[str, list[tuple[Box, Shard]]] = {}
        for name, box, view in shards:
            self._of.setdefault(name, []).append((box, view))

    def read(self, name: str, box: Box) -> torch.Tensor:
        """Return the values of a box: a view, or a part of the tensor computed by a LazyShard.

        Raises ReshardError for a box that does not lie within one of those held.
        """
        for own, view in self._of.get(name, ()):
            if box.intersect(own) == box:
                return view[box.within(own)]

        held = ", ".join(str(own) for own, _ in self._of.get(name, ()))
        raise ReshardError(f"{name} {box} is not held here: {held or 'nothing of it'}")


def same_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two views have the same elements of one storage."""
    return (
        a.data_ptr() == b.data_ptr()
        and a.dtype == b.dtype
        and a.stride() == b.stride()
        and a.device == b.device
    )
