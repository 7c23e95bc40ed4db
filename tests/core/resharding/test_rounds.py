"""Rounds of a plan: small enough for the buckets, the same on both sides, and together the whole of it."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
import torch
from helpers.brute import layout, whole
from helpers.random_layouts import layouts
from hypothesis import given, settings, strategies as st

from hybridflow.core.resharding.plan import ReshardError, ReshardPlan, plan_reshard
from hybridflow.core.resharding.rounds import Slice, plan_rounds, rank_rounds
from hybridflow.core.values.weights import Box, Param, WeightLayout


def one_to_one(shapes: dict[str, tuple[int, ...]], bucket_bytes: int) -> ReshardPlan:
    """Rank 0 has everything in float32, and rank 1 gets it."""
    everything = {name: whole(shape) for name, shape in shapes.items()}
    plan = plan_reshard(layout(shapes, {0: everything}), layout(shapes, {1: everything}))
    return attrs.evolve(plan, bucket_bytes=bucket_bytes)


@settings(max_examples=100, deadline=None)
@given(layouts(), st.sampled_from([64, 96, 256]))
def test_buckets_are_never_larger_than_asked_and_carry_everything_once(pair, bucket):
    source, target = pair
    plan = attrs.evolve(plan_reshard(source, target), bucket_bytes=bucket)
    try:
        rounds = plan_rounds(plan)
    except ReshardError as error:
        assert "too small" in str(error)
        return
    per_rank = {rank: rank_rounds(plan, rounds, rank) for rank in plan.ranks}
    arrived = {
        (t.receiver, t.name): np.zeros(target.params[t.name].shape, np.int32)
        for t in plan.transfers
    }
    for rank, made in per_rank.items():
        assert len(made) == len(rounds)
        for at, one in enumerate(made):
            for side in (one.sends, one.receives):
                nbytes = sum(b.numel * plan.wire[n].itemsize for m in side.values() for n, b in m)
                assert nbytes <= bucket // 4  # two rounds are under way, each in both directions
            for receiver, message in one.sends.items():
                assert per_rank[receiver][at].receives[rank] == message
            for message in one.receives.values():
                for name, box in message:
                    arrived[rank, name][box.slices()] += 1
    for (rank, name), got in arrived.items():
        want = np.zeros_like(got)
        for t in plan.transfers:
            if (t.receiver, t.name) == (rank, name):
                want[t.box.slices()] += 1
        assert (got == want).all()


def test_small_parameters_share_a_round_and_a_large_one_takes_several():
    plan = one_to_one(
        {"a": (16,), "b": (16,), "c": (4,), "large": (10, 16), "d": (1,)}, bucket_bytes=4 * 128
    )
    rounds = plan_rounds(plan)
    assert rounds[0] == (Slice("a"), Slice("b"))  # 64 bytes each: a quarter of the bucket is full
    assert rounds[1] == (Slice("c"),)  # the large one stands alone, and order is kept
    parts = rounds[2:-1]
    assert [cut.name for (cut,) in parts] == ["large"] * len(parts)
    assert [(cut.part, cut.parts) for (cut,) in parts] == [
        (at, len(parts)) for at in range(len(parts))
    ]
    assert len(parts) == 6  # 640 bytes, of which 124 fit: a piece may round up by one element
    assert rounds[-1] == (Slice("d"),)


def test_the_parts_of_a_box_follow_one_another_and_leave_nothing_out():
    box = Box((2, 1), (5, 4))
    numbers = np.arange(5 * 4).reshape(5, 4)
    inside = numbers[box.slices()].ravel().tolist()
    cut = [
        numbers[piece.slices()].ravel().tolist()
        for at in range(4)
        for piece in Slice("a", at, 4).of(box)
    ]
    assert [number for piece in cut for number in piece] == inside
    assert Slice("a").of(box) == (box,)


def test_a_bucket_in_which_no_piece_fits_is_refused_with_what_would_do():
    plan = one_to_one({"a": (100,)}, bucket_bytes=16)
    with pytest.raises(ReshardError, match="bucket_bytes 16") as caught:
        plan_rounds(plan)
    enough = int(str(caught.value).split()[-1])
    assert plan_rounds(attrs.evolve(plan, bucket_bytes=enough))


def test_within_a_message_wider_values_come_first():
    dtypes = {"narrow": torch.bfloat16, "wide": torch.float32}
    params = {name: Param((3,), dtype) for name, dtype in dtypes.items()}
    held = {name: whole((3,)) for name in dtypes}
    plan = plan_reshard(WeightLayout(params, {0: held}), WeightLayout(params, {1: held}))
    (only,) = rank_rounds(plan, plan_rounds(plan), 0)
    assert [name for name, _ in only.sends[1]] == ["wide", "narrow"]


def test_a_plan_that_moves_nothing_has_no_rounds():
    same = layout({"a": (4,)}, {0: {"a": whole((4,))}})
    plan = plan_reshard(same, same)
    assert plan_rounds(plan) == []
    assert rank_rounds(plan, [], 0) == []
