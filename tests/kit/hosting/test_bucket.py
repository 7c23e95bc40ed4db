"""Weights through shared memory, box by box, and the order of both sides' work on it."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hybridflow.core.values.weights import Box
from hybridflow.kit.hosting.bucket import ALIGNED, Bucket, BucketEntry, BucketReader, Load
from hybridflow.kit.hosting.fence import Fence

CPU = torch.device("cpu")


def test_closing_gives_the_file_back_once():
    bucket = Bucket(CPU, 64)
    fd = bucket.fd
    bucket.close()
    with pytest.raises(OSError):
        os.fstat(fd)
    bucket.close()


@pytest.fixture
def bucket():
    made = Bucket(CPU, 64)
    yield made
    made.close()


def test_boxes_of_any_size_and_dtype_arrive_as_they_were(bucket):
    generator = torch.Generator().manual_seed(0)
    parameters = {
        "large": torch.randn(9, 7, generator=generator),  # 252 bytes, in 64 at a time
        "long": torch.randn(2, 40, generator=generator),  # a row is larger than the bucket
        "half": torch.randn(3, 3, generator=generator).to(torch.bfloat16),
        "transposed": torch.randn(4, 2, generator=generator).T,
        "exact": torch.randn(16, generator=generator),  # fills the bucket
        "cube": torch.randn(3, 4, 5, generator=generator),
        "number": torch.tensor(7, dtype=torch.int64),
        "trained": torch.ones(2, requires_grad=True),
    }
    arrived = {name: torch.zeros_like(values) for name, values in parameters.items()}
    reader, times = BucketReader(bucket.handle(), CPU), 0

    def take(load: Load) -> None:
        nonlocal times
        times += 1
        for piece, values in reader.take(load):
            arrived[piece.name].detach()[piece.box.slices()] += values
        assert reader.done() is None

    for name, values in parameters.items():
        for load in bucket.write(name, Box.full(values.shape), values, values.dtype):
            take(load)
    take(bucket.taken())
    assert times > 8
    for name, values in parameters.items():
        assert torch.equal(arrived[name], values.detach()), name


def test_a_part_of_a_parameter_arrives_in_the_reader_s_dtype(bucket):
    box = Box((2, 1), (4, 3))
    values = torch.tensor([[1.0, 2.5], [3.0, 1 / 3]])
    assert list(bucket.write("a", box, values, torch.bfloat16)) == []
    load = bucket.taken()
    assert load.pieces == (BucketEntry("a", box, torch.bfloat16, 0),)
    [(_, found)] = BucketReader(bucket.handle(), CPU).take(load)
    assert found.dtype == torch.bfloat16 and torch.equal(found, values.to(torch.bfloat16))


def test_pieces_say_what_they_are_and_begin_at_aligned_places(bucket):
    ints = torch.arange(3, dtype=torch.int8)
    assert list(bucket.write("a", Box.full((3,)), ints, torch.int8)) == []
    # 16 + 48 bytes are full: six rows of two, and then the last one.
    [first] = bucket.write("b", Box.full((7, 2)), torch.arange(14.0).view(7, 2), torch.float32)
    assert first.pieces == (
        BucketEntry("a", Box.full((3,)), torch.int8, 0),
        BucketEntry("b", Box((0, 0), (6, 2)), torch.float32, ALIGNED),
    )
    assert bucket.taken().pieces == (BucketEntry("b", Box((6, 0), (7, 2)), torch.float32, 0),)
    assert bucket.taken() == Load(())


def test_both_sides_see_the_same_memory(bucket):
    window = BucketReader(bucket.handle(), CPU).memory
    assert window.dtype == torch.uint8 and len(window) == 64
    sevens = torch.full((4,), 7, dtype=torch.uint8)
    list(bucket.write("a", Box.full((4,)), sevens, torch.uint8))
    assert window[:5].tolist() == [7, 7, 7, 7, 0]


class Recorded:
    """Stands in for torch.cuda: its events and streams only note what they are told."""

    def __init__(self, side: str, told: list[str]):
        self.side, self.told = side, told
        stand_in = self

        class Event:
            def __init__(self, interprocess: bool):
                assert interprocess

            def record(self, stream: Any) -> None:
                stand_in.note("record")

            def ipc_handle(self) -> bytes:
                stand_in.note("send handle")
                return stand_in.side.encode()

            @staticmethod
            def from_ipc_handle(device: torch.device, handle: bytes) -> str:
                return handle.decode()

        self.Event = Event

    def note(self, what: str) -> None:
        self.told.append(f"{self.side}: {what}")

    def current_stream(self, device: torch.device) -> Recorded:
        return self

    def wait_event(self, event: str) -> None:
        self.note(f"wait for {event}")


class Copies(TorchDispatchMode):
    """Notes each copy."""

    def __init__(self, told: list[str], side: str):
        super().__init__()
        self.told, self.side = told, side

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default:
            self.told.append(f"{self.side}: copy")
        return func(*args, **(kwargs or {}))


def orders(waiting: bool = True) -> list[str]:
    """What both sides do in two rounds through one bucket on a "GPU"."""
    told: list[str] = []
    gpu = torch.device("cuda")

    def fence(side: str) -> Fence:
        made = Fence(gpu, Recorded(side, told))
        if not waiting:
            made.wait = lambda handle: None  # type: ignore[method-assign]
        return made

    bucket = Bucket(CPU, 64, fence("writer"))
    reader = BucketReader(bucket.handle(), CPU, fence("reader"))
    home = torch.zeros(2, 2)
    for value in (1.0, 2.0):
        with Copies(told, "writer"):
            list(bucket.write("a", Box.full((2, 2)), torch.full((2, 2), value), torch.float32))
        load = bucket.taken()
        with Copies(told, "reader"):
            for _, values in reader.take(load):
                home.copy_(values)
        bucket.emptied(reader.done())
        assert home.tolist() == [[value] * 2] * 2
    bucket.close()
    return told


ONE_ROUND = [
    "writer: copy",
    "writer: record",
    "writer: send handle",
    "reader: wait for writer",
    "reader: copy",
    "reader: record",
    "reader: send handle",
    "writer: wait for reader",
]


def test_on_a_gpu_each_side_waits_for_the_other_s_event_before_it_copies():
    assert orders() == ONE_ROUND * 2
    # Without the waits the order above does not come about by itself.
    assert orders(waiting=False) != ONE_ROUND * 2


def test_on_a_cpu_there_is_nothing_to_wait_for():
    fence = Fence(CPU, None)
    assert fence.record() is None
    fence.wait(None)
