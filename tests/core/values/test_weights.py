"""Boxes beside an account of every element, and who holds which."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.brute import mask, whole
from hypothesis import given, strategies as st

from hybridflow.core.values.weights import Box, LazyShard, Param, WeightLayout

SHAPE = (4, 3, 5)
INTERVALS = [st.tuples(st.integers(0, size), st.integers(0, size)).map(sorted) for size in SHAPE]
BOXES = st.tuples(*INTERVALS).map(lambda ends: Box(*zip(*ends, strict=True)))
"""Any of SHAPE, empty ones too."""


@given(BOXES)
def test_a_box_is_as_large_as_what_it_cuts_out(box):
    numbers = torch.arange(4 * 3 * 5).view(SHAPE)
    assert numbers[box.slices()].shape == box.shape
    assert numbers[box.slices()].numel() == box.numel


def test_a_part_is_the_whole_but_for_one_dimension():
    assert Box.full([2, 3]) == Box((0, 0), (2, 3))
    assert Box.part((2, 3, 4), 1, 1, 2) == Box((0, 1, 0), (2, 2, 4))
    assert Box.full(()).numel == 1
    assert str(Box((0, 1), (2, 3))) == "[0:2, 1:3]"


@given(BOXES, BOXES)
def test_two_boxes_share_the_elements_that_are_in_both(one, other):
    both = mask(SHAPE, [one]) * mask(SHAPE, [other])
    common = one.intersect(other)
    assert (mask(SHAPE, [] if common is None else [common]) == both).all()
    assert (common is None) == (not both.any())


@given(BOXES, BOXES)
def test_what_one_box_holds_and_another_does_not_is_told_once_in_few_boxes(one, other):
    left = list(one.minus(other))
    assert (mask(SHAPE, left) == mask(SHAPE, [one]) * (1 - mask(SHAPE, [other]))).all()
    assert len(left) <= 2 * len(SHAPE)
    assert all(box.numel for box in left)


@given(BOXES.filter(lambda box: box.numel), BOXES.filter(lambda box: box.numel))
def test_a_box_is_found_in_a_tensor_that_holds_a_larger_one(one, other):
    inner = one.intersect(other)
    if inner is not None:
        numbers = torch.arange(4 * 3 * 5).view(SHAPE)
        assert torch.equal(numbers[one.slices()][inner.within(one)], numbers[inner.slices()])


@given(st.data(), BOXES.filter(lambda box: box.numel))
def test_a_run_of_a_flattened_box_is_few_boxes_in_that_order(data, box):
    start = data.draw(st.integers(0, box.numel))
    stop = data.draw(st.integers(start, box.numel))
    numbers = np.arange(4 * 3 * 5).reshape(SHAPE)
    parts = list(box.flat_range(start, stop))
    found = [numbers[part.slices()].ravel() for part in parts]
    assert (
        np.concatenate([*found, []]).tolist() == numbers[box.slices()].ravel()[start:stop].tolist()
    )
    assert len(parts) <= 2 * len(SHAPE) - 1


def test_a_scalar_is_a_run_of_one():
    assert list(Box((), ()).flat_range(0, 1)) == [Box((), ())]
    assert list(Box((), ()).flat_range(0, 0)) == []


def test_a_lazy_shard_is_made_anew_whenever_it_is_read():
    made = []

    def make():
        made.append(1)
        return torch.arange(6).view(2, 3)

    shard = LazyShard((2, 3), make)
    assert made == []
    assert shard[(slice(1, 2), slice(0, 2))].tolist() == [[3, 4]]
    assert shard[(slice(0, 1), slice(2, 3))].tolist() == [[2]]
    assert len(made) == 2


ROWS = {0: (Box((0, 0), (2, 3)),), 1: (Box((2, 0), (4, 3)),)}
PARAMS = {
    "a": Param((4, 3), torch.float32),
    "b": Param((4, 3), torch.bfloat16),
    "norm": Param((3,), torch.float32),
}
SHARDS = {"a": ROWS, "b": ROWS, "norm": {1: whole((3,))}}
HELD = {
    0: {"a": ROWS[0], "b": ROWS[0]},
    1: {"a": ROWS[1], "b": ROWS[1], "norm": whole((3,))},
    2: {},
}


@pytest.fixture(params=["by rank", "by name"])
def layout(request):
    ties = {"head": "a"}
    if request.param == "by rank":
        return WeightLayout(PARAMS, HELD, ties, frozenset({"norm"}))
    return WeightLayout.by_name(PARAMS, SHARDS, [0, 1, 2], ties, ["norm"])


def test_a_layout_reads_the_same_by_rank_and_by_name(layout):
    assert layout.ranks == [0, 1, 2]
    assert {rank: dict(layout.held[rank]) for rank in layout.held} == HELD
    assert {name: dict(ranks) for name, ranks in layout.shards().items()} == SHARDS
    assert len(layout.held) == 3
    with pytest.raises(KeyError):
        layout.held[3]


def test_the_bytes_of_a_rank_are_those_of_its_elements(layout):
    assert PARAMS["b"].numel == 12
    assert PARAMS["b"].nbytes == 24
    assert [layout.nbytes(rank) for rank in range(4)] == [
        6 * 4 + 6 * 2,
        6 * 4 + 6 * 2 + 3 * 4,
        0,
        0,
    ]


def test_renumbered_ranks_hold_what_the_old_ones_did(layout):
    moved = layout.renumbered(lambda rank: 10 - rank)
    assert moved.ranks == [8, 9, 10]
    assert {10 - rank: dict(moved.held[rank]) for rank in moved.held} == HELD
    assert (moved.params, moved.ties, moved.opaque) == (layout.params, layout.ties, layout.opaque)


def test_parameters_that_share_their_boxes_still_do_when_renumbered():
    moved = WeightLayout.by_name(PARAMS, SHARDS, [0, 1, 2]).renumbered(lambda rank: rank + 4)
    assert moved.shards()["a"] is moved.shards()["b"]
