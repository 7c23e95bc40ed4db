"""The planner against an account of every element."""

from __future__ import annotations

import pytest
import torch
from helpers.brute import best_balance, check_plan, layout, lower_bound, whole
from helpers.random_layouts import layouts
from hypothesis import given, settings, strategies as st

from hybridflow.core.resharding.plan import ReshardError, plan_reshard
from hybridflow.core.values.weights import Box, WeightLayout


@settings(max_examples=300, deadline=None)
@given(layouts())
def test_every_lacking_element_arrives_once_and_nothing_else_moves(pair):
    source, target = pair
    plan = plan_reshard(source, target)
    check_plan(plan)
    for rank in target.held:
        assert plan.bytes_received[rank] == lower_bound(source, target, rank)


@settings(max_examples=200, deadline=None)
@given(layouts())
def test_the_most_loaded_sender_is_within_a_tenth_of_the_best_balance(pair):
    plan = plan_reshard(*pair)
    most = max(plan.bytes_sent.values())
    elements = 4 * len(plan.target.params) * 4  # a box is cut between elements, never inside one
    assert most <= 1.1 * best_balance(plan) + elements


@settings(max_examples=150, deadline=None)
@given(layouts(), st.sampled_from([1024, 1100]))
def test_plans_are_deterministic_whatever_the_order_of_ranks_and_names(pair, bucket):
    source, target = pair

    def shuffled(side):
        held = {r: dict(reversed(list(h.items()))) for r, h in reversed(list(side.held.items()))}
        return WeightLayout(side.params, held, side.ties)

    first, second = (
        plan_reshard(source, target, bucket),
        plan_reshard(shuffled(source), shuffled(target), bucket),
    )
    assert sorted(map(str, first.transfers)) == sorted(map(str, second.transfers))
    assert list(first.transfers) == list(plan_reshard(source, target, bucket).transfers)


def test_all_problems_of_two_layouts_are_listed():
    source = layout({"a": (2, 2), "b": (3,), "c": (1,), "head": (2,)}, {0: {n: whole(s) for n, s in
                    {"a": (2, 2), "b": (3,), "c": (1,), "head": (2,)}.items()}})  # fmt: skip
    target = layout({"a": (2, 3), "b": (3,), "d": (4,)}, {0: {}}, ties={"head": "a"})
    with pytest.raises(ReshardError) as caught:
        plan_reshard(source, target)
    text = str(caught.value)
    for said in ("4 problems", "a is [2, 2] ", "d [4] ", "c [1] ", "head has "):
        assert said in text


def test_what_nobody_holds_is_named_with_its_rank():
    source = layout(
        {"a": (4, 2)}, {0: {"a": (Box((0, 0), (1, 2)),)}, 1: {"a": (Box((2, 0), (4, 2)),)}}
    )
    with pytest.raises(ReshardError, match=r"a \[1:2, 0:2\] is wanted by rank 1"):
        plan_reshard(source, layout({"a": (4, 2)}, {1: {"a": whole((4, 2))}}))


@pytest.mark.parametrize(
    "boxes", [(Box((0,), (3,)), Box((2,), (4,))), (Box((2,), (5,)),), (Box((0, 0), (1, 1)),)]
)
def test_holdings_that_overlap_or_reach_outside_are_refused(boxes):
    wrong, right = (
        layout({"a": (4,)}, {0: {"a": boxes}}),
        layout({"a": (4,)}, {0: {"a": whole((4,))}}),
    )
    for pair in ((wrong, right), (right, wrong)):
        with pytest.raises(ReshardError, match="layout is wrong"):
            plan_reshard(*pair)


def test_a_tied_source_serves_an_untied_target():
    source = layout({"embed": (4, 2)}, {0: {"embed": whole((4, 2))}}, ties={"head": "embed"})
    shapes = {"embed": (4, 2), "head": (4, 2)}
    plan = plan_reshard(source, layout(shapes, {1: {n: whole(s) for n, s in shapes.items()}}))
    check_plan(plan)
    assert plan.bytes_received == {0: 0, 1: 64}


def test_the_narrower_dtype_travels_and_what_differs_is_not_aliased():
    shapes = {"a": (4, 2)}
    source = layout(
        shapes, {0: {"a": (Box((0, 0), (2, 2)),)}, 1: {"a": (Box((2, 0), (4, 2)),)}}, torch.float32
    )
    full = {r: {"a": whole((4, 2))} for r in (0, 1)}
    plan = plan_reshard(source, layout(shapes, full, torch.bfloat16))
    assert plan.wire == {"a": torch.bfloat16}
    assert plan.bytes_received == {0: 8, 1: 8} and plan.bytes_local == {0: 8, 1: 8}
    assert plan.bytes_aliased == {0: 0, 1: 0} and plan.peak_bytes == {0: 32, 1: 32}
    same = plan_reshard(source, layout(shapes, full, torch.float32))
    assert same.bytes_aliased == {0: 16, 1: 16} and same.peak_bytes == {0: 32, 1: 32}
    opaque = plan_reshard(source, layout(shapes, full, torch.float32, opaque=frozenset({"a"})))
    assert opaque.bytes_aliased == {0: 0, 1: 0} and opaque.peak_bytes == {0: 48, 1: 48}


def test_replicas_share_the_sending():
    shapes = {f"p{i}": (64, 8) for i in range(3)}
    source = layout(shapes, {r: {n: whole(s) for n, s in shapes.items()} for r in range(4)})
    plan = plan_reshard(source, layout(shapes, {9: {n: whole(s) for n, s in shapes.items()}}))
    check_plan(plan)
    assert set(plan.bytes_sent[r] for r in range(4)) == {3 * 64 * 8 * 4 // 4}


def test_a_bucket_below_the_least_is_refused():
    one = layout({"a": (4,)}, {0: {"a": whole((4,))}})
    with pytest.raises(ReshardError, match="at least 1,024"):
        plan_reshard(one, one, 100)
