"""Weights through shared memory, in pieces."""

from __future__ import annotations

import os

import pytest
import torch

from hybridflow.kit.hosting.bucket import ALIGNED, Assembler, Bucket, Piece, open_bucket

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


Parameters = dict[str, torch.Tensor]


def through(bucket: Bucket, parameters: Parameters) -> tuple[Parameters, int]:
    """What arrives on the other side, and how often the bucket was handed over."""
    assembler, arrived, times = Assembler(open_bucket(bucket.handle())), {}, 0
    for name, values in parameters.items():
        for pieces in bucket.write(name, values):
            times += 1
            arrived |= dict(assembler.take(pieces))
    arrived |= dict(assembler.take(bucket.taken()))
    return arrived, times + 1


def test_parameters_of_any_size_and_dtype_arrive_as_they_were(bucket):
    generator = torch.Generator().manual_seed(0)
    parameters = {
        "large": torch.randn(9, 7, generator=generator),  # 252 bytes, in 64 at a time
        "half": torch.randn(3, 3, generator=generator).to(torch.bfloat16),
        "transposed": torch.randn(4, 2, generator=generator).T,
        "exact": torch.randn(16, generator=generator),  # fills the bucket
        "number": torch.tensor(7, dtype=torch.int64),
        "trained": torch.ones(2, requires_grad=True),
    }
    arrived, times = through(bucket, parameters)
    assert list(arrived) == list(parameters) and times > 4
    for name, values in parameters.items():
        assert arrived[name].dtype == values.dtype, name
        assert torch.equal(arrived[name], values.detach()), name


def test_pieces_say_what_they_are_and_begin_at_aligned_places(bucket):
    assert list(bucket.write("a", torch.arange(3, dtype=torch.int8))) == []
    [first] = bucket.write("b", torch.arange(14.0).view(7, 2))  # 16 + 48 bytes are full
    assert first == [
        Piece("a", (3,), torch.int8, 0, 3, 0),
        Piece("b", (7, 2), torch.float32, 0, 12, ALIGNED),
    ]
    assert bucket.taken() == [Piece("b", (7, 2), torch.float32, 12, 2, 0)]
    assert bucket.taken() == []


def test_both_sides_see_the_same_memory(bucket):
    window = open_bucket(bucket.handle())
    assert window.dtype == torch.uint8 and len(window) == 64
    list(bucket.write("a", torch.full((4,), 7, dtype=torch.uint8)))
    assert window[:5].tolist() == [7, 7, 7, 7, 0]


def test_what_has_arrived_stays_when_the_bucket_is_filled_again(bucket):
    assembler = Assembler(open_bucket(bucket.handle()))
    list(bucket.write("a", torch.tensor([1.0, 2.0])))
    [(_, first)] = assembler.take(bucket.taken())
    list(bucket.write("a", torch.tensor([3.0, 4.0])))
    [(_, second)] = assembler.take(bucket.taken())
    assert (first.tolist(), second.tolist()) == ([1.0, 2.0], [3.0, 4.0])
