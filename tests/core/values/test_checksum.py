"""Sums of parts beside the sum of the whole, and beside one element after the other in Python."""

from __future__ import annotations

import itertools

import pytest
import torch

from hybridflow.core.values.checksum import GRAIN, PARTS, checksum, part_of, totals
from hybridflow.core.values.weights import Box


def sum_of(values: torch.Tensor, box: Box) -> int:
    return totals([("it", checksum(values, box))])["it"]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn]
)
@pytest.mark.parametrize("shape", [(7, 5), (6, 16), (40,), (3, 4, 24), (5, 1, 3)])
def test_a_parameters_checksum_is_the_sum_over_any_cut(dtype, shape):
    whole = torch.randn(shape).to(dtype)
    full = Box.full(shape)
    numel = whole.numel()
    for cuts in ((0, 13, numel), (0, 8, 9, numel), (0, numel // 2, numel)):
        boxes = [box for i, j in itertools.pairwise(cuts) for box in full.flat_range(i, j)]
        parts = [("it", checksum(whole[box.slices()], box)) for box in boxes]
        assert totals(parts)["it"] == sum_of(whole, full)


def test_the_way_in_which_values_lie_does_not_count():
    whole = torch.randn(8, 16)
    full = Box.full((8, 16))
    across = whole.t().contiguous().t()
    beside = torch.randn(8 * 16 + 1)[1:].view(8, 16).copy_(whole)
    assert sum_of(across, full) == sum_of(beside, full) == sum_of(whole, full)


@pytest.mark.parametrize("shape", [(7, 5), (8, 16), (64,), (4, 8, 8)])
def test_two_elements_that_change_places_are_seen(shape):
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(shape, generator=generator).to(torch.bfloat16)
    full = Box.full(shape)
    before = sum_of(whole, full)
    flat = whole.view(-1)
    for i, j in torch.randint(0, whole.numel(), (200, 2), generator=generator).tolist():
        if flat[i] != flat[j]:
            flat[[i, j]] = flat[[j, i]]
            assert sum_of(whole, full) != before
            flat[[i, j]] = flat[[j, i]]


def test_experts_in_another_order_are_seen():
    whole = torch.randn(4, 8, 16)
    full = Box.full(whole.shape)
    assert sum_of(whole[[1, 0, 2, 3]], full) != sum_of(whole, full)
    assert sum_of(whole.transpose(1, 2).contiguous().view(4, 8, 16), full) != sum_of(whole, full)


def test_a_single_bit_of_any_element_is_seen():
    whole = torch.randn(5, 16).to(torch.bfloat16)
    full = Box.full((5, 16))
    before = sum_of(whole, full)
    bits = whole.view(torch.int16).view(-1)
    for place in range(80):
        for bit in (0, 7, 14):
            bits[place] ^= 1 << bit
            assert sum_of(whole, full) != before
            bits[place] ^= 1 << bit


def test_a_scalar_and_nothing_have_sums_too():
    assert sum_of(torch.tensor(3.0), Box((), ())) != sum_of(torch.tensor(4.0), Box((), ()))
    assert sum_of(torch.zeros(0, 4), Box((2, 0), (2, 4))) == 0


@pytest.mark.parametrize(
    "shape", [(1024, 1024), (100_000, 8), (64,), (9000,), (8, 300, 64), (), (3, 7)]
)
def test_the_parts_are_disjoint_and_together_everything(shape):
    counted = torch.zeros(shape, dtype=torch.int64)
    largest = 0
    for part in range(PARTS):
        box = part_of("a.weight", shape, part)
        if box is not None:
            counted[box.slices()] += 1
            largest = max(largest, box.numel)
    assert bool((counted == 1).all())
    numel = counted.numel()
    assert largest <= max(numel / PARTS + GRAIN + numel / max(shape, default=1), 1)
    assert part_of("a.weight", shape, None) == Box.full(shape)


def test_small_parameters_take_turns():
    parts = {
        next(part for part in range(PARTS) if part_of(f"layers.{i}.norm", (64,), part) is not None)
        for i in range(200)
    }
    assert len(parts) > 25


def test_sums_of_one_key_are_added():
    ones = torch.tensor(-1)
    assert totals([("a", ones), ("b", ones), ("a", torch.tensor(3))]) == {"a": 2, "b": 2**64 - 1}
    assert totals([]) == {}
