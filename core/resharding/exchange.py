"""A plan carried out on one rank: pack, send, receive, unpack, bucket by bucket, one bucket ahead of the unpacking."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import attrs
import torch

from hybridflow.core.contracts.transport import Pending, Transport
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
    """What one rank's part of an exchange cost."""

    bytes_received: int = 0
    bytes_sent: int = 0
    """Sizes of the buffers, so of exactly what travels."""
    messages: int = 0
    peak_buffer_bytes: int = 0
    """The most bytes in messages at a time, over all rounds under way: at most the plan's bucket_bytes."""
    seconds: float = 0.0


class Exchange:
    """The rounds of one rank, made once for a plan and run at every sync."""

    def __init__(self, plan: ReshardPlan, rank: int, device: torch.device):
        self.plan, self.rank, self.device = plan, rank, device
        self.rounds: list[RankRound] = rank_rounds(plan, plan_rounds(plan), rank)

    def message_bytes(self, message: Message) -> int:
        return sum(box.numel * self.plan.wire[name].itemsize for name, box in message)

    def run(self, transport: Transport, read: Read, write: Write) -> Moved:
        """All rounds. A failure here is raised after the last round: the other ranks' rounds still meet."""
        moved, started = Moved(), time.perf_counter()
        failure: Exception | None = None
        ahead: list[tuple[Pending, RankRound, int]] = []
        held = 0

        def finish() -> None:
            nonlocal failure, held
            pending, one, size = ahead.pop(0)
            received = pending.wait()
            try:
                if failure is None:
                    for sender, message in one.receives.items():
                        self.unpack(message, received[sender], write)
            except Exception as error:
                failure = error
            held -= size

        for one in self.rounds:
            try:
                outgoing = self.pack_all(one, read)
            except (
                Exception
            ) as error:  # zeros go in their place; all ranks hear of it before anybody uses them
                failure = failure or error
                outgoing = {r: torch.zeros(self.message_bytes(m), dtype=torch.uint8, device=self.device)
                            for r, m in one.sends.items()}  # fmt: skip
            incoming = {
                sender: self.message_bytes(message) for sender, message in one.receives.items()
            }
            size = sum({id(t): t.numel() for t in outgoing.values()}.values()) + sum(
                incoming.values()
            )
            ahead.append((transport.start(outgoing, incoming), one, size))
            held += size
            moved.peak_buffer_bytes = max(moved.peak_buffer_bytes, held)
            moved.bytes_received += sum(incoming.values())
            moved.bytes_sent += sum(t.numel() for t in outgoing.values())
            moved.messages += len(outgoing)
            if len(ahead) == IN_FLIGHT:
                finish()
        while ahead:
            finish()
        transport.close()
        moved.seconds = time.perf_counter() - started
        if failure is not None:
            raise failure
        return moved

    def pack_all(self, one: RankRound, read: Read) -> dict[int, torch.Tensor]:
        """Receiver -> message; equal messages are packed once."""
        made: dict[Message, torch.Tensor] = {}
        for message in one.sends.values():
            if message not in made:
                made[message] = self.pack(message, read)
        return {receiver: made[message] for receiver, message in one.sends.items()}

    @torch.no_grad()
    def pack(self, message: Message, read: Read) -> torch.Tensor:
        """uint8 [n]. One piece that lies in one run of memory, in wire dtype, goes as it is."""
        if len(message) == 1:
            name, box = message[0]
            values = read(self.plan.origin[name], box)
            if (
                values.dtype == self.plan.wire[name]
                and values.is_contiguous()
                and values.device == self.device
            ):
                return values.detach().reshape(-1).view(torch.uint8)
        buffer = torch.empty(self.message_bytes(message), dtype=torch.uint8, device=self.device)
        for (name, box), values in self._views(message, buffer):
            values.copy_(read(self.plan.origin[name], box))
        return buffer

    @torch.no_grad()
    def unpack(self, message: Message, buffer: torch.Tensor, write: Write) -> None:
        for (name, box), values in self._views(message, buffer):
            write(name, box, values)

    def _views(
        self, message: Message, buffer: torch.Tensor
    ) -> Iterable[tuple[tuple[str, Box], torch.Tensor]]:
        at = 0
        for name, box in message:
            dtype = self.plan.wire[name]
            end = at + box.numel * dtype.itemsize
            yield (name, box), buffer[at:end].view(dtype).view(box.shape)
            at = end


class Shards:
    """A rank's source storage: finds the values of a box among the boxes it holds."""

    def __init__(self, shards: Iterable[tuple[str, Box, Shard]]):
        self._of: dict[str, list[tuple[Box, Shard]]] = {}
        for name, box, view in shards:
            self._of.setdefault(name, []).append((box, view))

    def read(self, name: str, box: Box) -> torch.Tensor:
        """A view, or of a LazyShard a part of what it makes.

        Raises ReshardError for a box that does not lie within one of those held.
        """
        for own, view in self._of.get(name, ()):
            if box.intersect(own) == box:
                return view[box.within(own)]
        raise ReshardError(f"{name} {box} is not held here: {self._held(name)}")

    def _held(self, name: str) -> str:
        return ", ".join(str(own) for own, _ in self._of.get(name, ())) or "nothing of it"


def same_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two views are of the very same elements."""
    return (
        a.data_ptr() == b.data_ptr()
        and a.dtype == b.dtype
        and a.stride() == b.stride()
        and a.device == b.device
    )


def checksum(values: torch.Tensor, box: Box, shape: Sequence[int]) -> int:
    """A sum over elements of their bits, each times an odd number made of its place in the parameter, modulo 2^64.

    Sums of disjoint boxes add up to the parameter's, however it is cut; swapped elements change it.
    """
    if not values.numel():
        return 0
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
    numbers = values.detach().contiguous().view(bits).to(torch.int64)
    place = torch.zeros(box.shape, dtype=torch.int64, device=values.device)
    stride = 1
    for dim in reversed(range(len(shape))):
        steps = torch.arange(box.start[dim], box.stop[dim], device=values.device) * stride
        place += steps.view([-1 if d == dim else 1 for d in range(len(shape))])
        stride *= shape[dim]
    weight = (place * -7046029254386353131) ^ (place >> 7) | 1  # 64 mixed bits of the place, odd
    return int(((numbers + 1) * weight).sum()) & (2**64 - 1)
