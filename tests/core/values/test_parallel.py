"""Ranks, coordinates and process groups of training and generation layouts."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from hybridflow.core.values.parallel import Coords, ParallelLayout, generation_layout

ORDERS = ("tp-cp-pp-dp", "tp-cp-dp-pp")


@st.composite
def layouts(draw, cp=2):
    size = st.integers(1, 4)
    return ParallelLayout(
        pp=draw(size),
        tp=draw(size),
        dp=draw(size),
        cp=draw(st.integers(1, cp)),
        order=draw(st.sampled_from(ORDERS)),
    )


def divisors(n):
    return [i for i in range(1, n + 1) if n % i == 0]


def test_the_papers_example_groups_every_second_rank_for_generation():
    layout = generation_layout(ParallelLayout(pp=1, tp=4, dp=2), pp=1, tp=2)
    assert layout.groups("tp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert layout.groups("micro_dp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert layout.groups("pp") == [[i] for i in range(8)]


def test_consecutive_grouping_takes_neighbours():
    layout = generation_layout(ParallelLayout(pp=1, tp=4, dp=2), pp=1, tp=2, grouping="consecutive")
    assert layout.groups("tp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert layout.groups("micro_dp") == [[0, 2], [1, 3], [4, 6], [5, 7]]


def test_micro_dp_groups_are_not_consecutive_when_the_pipeline_is_folded():
    layout = generation_layout(ParallelLayout(pp=2, tp=4, dp=1), pp=1, tp=2)
    assert layout.groups("micro_dp") == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert layout.groups("tp") == [[0, 2], [1, 3], [4, 6], [5, 7]]


def test_generation_pipelines_take_every_second_stage_of_four():
    layout = generation_layout(ParallelLayout(pp=4, tp=1, dp=1), pp=2, tp=1)
    assert layout.groups("pp") == [[0, 2], [1, 3]]
    assert layout.groups("replica") == [[0, 2], [1, 3]]
    assert layout.groups("micro_dp") == [[0, 1], [2, 3]]


def test_fsdp_over_eight_ranks_generates_with_tp_two_on_ranks_that_hold_different_halves():
    layout = generation_layout(ParallelLayout(dp=8), tp=2)
    assert layout.groups("tp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert [layout.output_rank(i) for i in range(4)] == [0, 1, 2, 3]
    in_nodes = generation_layout(ParallelLayout(dp=8), tp=2, node=4)
    assert in_nodes.groups("tp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert generation_layout(ParallelLayout(dp=8), pp=2, tp=2).replicas == (
        ((0, 4), (1, 5)),
        ((2, 6), (3, 7)),
    )
    uneven = generation_layout(ParallelLayout(dp=12), tp=4, node=6)
    assert uneven.groups("tp") == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_fsdp_over_eight_ranks_generates_with_tp_two_on_neighbouring_ranks_when_told_to():
    layout = generation_layout(ParallelLayout(dp=8), tp=2, grouping="consecutive")
    assert layout.groups("tp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [layout.ranks(i) for i in range(len(layout.replicas))] == [
        [0, 1],
        [2, 3],
        [4, 5],
        [6, 7],
    ]
    assert [layout.output_rank(i) for i in range(4)] == [0, 2, 4, 6]
    assert layout.groups("micro_dp") == [[i] for i in range(8)]


def test_the_papers_order_keeps_a_replica_together_and_megatrons_keeps_a_stage_together():
    paper = ParallelLayout(pp=2, tp=2, dp=2)
    assert paper.groups("tp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert paper.groups("pp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert paper.groups("dp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    megatron = ParallelLayout(pp=2, tp=2, dp=2, order="tp-cp-dp-pp")
    assert megatron.groups("tp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert megatron.groups("dp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert megatron.groups("pp") == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_groups_of_several_axes_differ_in_these_alone():
    assert ParallelLayout(tp=2, cp=2, dp=2).groups("cp-dp") == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert ParallelLayout(pp=2, tp=2, dp=2).groups("tp-pp") == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_experts_are_spread_over_neighbouring_dp_ranks():
    layout = ParallelLayout(tp=2, dp=4, ep=2)
    assert layout.groups("ep") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert [layout.coords(r).ep for r in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]


def test_coordinates_of_a_rank_are_what_the_order_says():
    assert ParallelLayout(pp=2, tp=2, dp=3, cp=2).coords(13) == Coords(tp=1, cp=0, pp=1, dp=1)
    assert ParallelLayout(pp=2, tp=2, dp=3, cp=2, order="tp-cp-dp-pp").coords(13) == Coords(
        tp=1, cp=0, pp=1, dp=0
    )


@given(layouts())
def test_rank_and_coords_are_inverses(layout):
    for rank in range(layout.world):
        at = layout.coords(rank)
        assert layout.rank(tp=at.tp, cp=at.cp, pp=at.pp, dp=at.dp) == rank
    assert len({layout.coords(r) for r in range(layout.world)}) == layout.world


@given(layouts(), st.sampled_from(["tp", "cp", "pp", "dp", "cp-dp", "tp-pp", "tp-cp-pp-dp"]))
def test_the_groups_of_an_axis_hold_every_rank_once_and_agree_on_the_other_axes(layout, axis):
    groups = layout.groups(axis)
    assert sorted(rank for group in groups for rank in group) == list(range(layout.world))
    assert [group[0] for group in groups] == sorted(group[0] for group in groups)
    for group in groups:
        fixed = {
            tuple(getattr(layout.coords(r), a) for a in ("tp", "cp", "pp", "dp") if a not in axis)
            for r in group
        }
        assert len(fixed) == 1


@given(layouts(), st.data())
def test_zero_redundancy_grouping_puts_each_training_shard_inside_the_generation_shard(train, data):
    pp, tp = (
        data.draw(st.sampled_from(divisors(train.pp))),
        data.draw(st.sampled_from(divisors(train.tp))),
    )
    layout = generation_layout(train, pp, tp)
    for replica in layout.replicas:
        for p_g, stage in enumerate(replica):
            for t_g, rank in enumerate(stage):
                at = train.coords(rank)
                assert t_g * train.tp <= at.tp * tp and (at.tp + 1) * tp <= (t_g + 1) * train.tp
                assert p_g * train.pp <= at.pp * pp and (at.pp + 1) * pp <= (p_g + 1) * train.pp


def test_consecutive_grouping_does_not():
    train = ParallelLayout(tp=4)
    stage = generation_layout(train, 1, 2, "consecutive").replicas[0][0]
    assert stage == (0, 1)  # rank 1 holds the second quarter and generates with the second half


@given(layouts(), st.data(), st.sampled_from(["zero-redundancy", "consecutive"]))
def test_generation_groups_hold_every_rank_once(train, data, grouping):
    tp = data.draw(st.sampled_from(divisors(train.world)))
    pp = data.draw(st.sampled_from(divisors(train.world // tp)))
    layout = generation_layout(train, pp, tp, grouping)
    assert len(layout.replicas) == train.world // (pp * tp)
    assert sorted(layout.replica_of) == list(range(train.world))
    for kind, size in (("tp", tp), ("pp", pp), ("micro_dp", None)):
        groups = layout.groups(kind)
        assert sorted(rank for group in groups for rank in group) == list(range(train.world))
        assert size is None or {len(group) for group in groups} == {size}


@given(layouts(cp=1), st.data())
def test_micro_dp_groups_are_ranks_of_one_replica_with_equal_generation_shards(train, data):
    pp, tp = (
        data.draw(st.sampled_from(divisors(train.pp))),
        data.draw(st.sampled_from(divisors(train.tp))),
    )

    def shard(rank):
        at = train.coords(rank)
        return at.dp, at.tp // (train.tp // tp), at.pp // (train.pp // pp)

    expected = {}
    for rank in range(train.world):
        expected.setdefault(shard(rank), []).append(rank)
    assert generation_layout(train, pp, tp).groups("micro_dp") == sorted(expected.values())


@pytest.mark.parametrize(
    "sizes", [{"tp": 0}, {"dp": -1}, {"pp": 1.5}, {"cp": True}, {"dp": 4, "ep": 3}]
)
def test_sizes_that_cannot_be_are_refused(sizes):
    with pytest.raises(ValueError, match="must"):
        ParallelLayout(**sizes)


@pytest.mark.parametrize("order", ["tp-pp-dp", "tp-cp-pp-dp-ep", "tp-tp-pp-dp", ""])
def test_an_order_that_does_not_name_each_axis_once_is_refused(order):
    with pytest.raises(ValueError, match="order must name each of tp, cp, pp, dp once"):
        ParallelLayout(order=order)


def test_ranks_axes_and_kinds_that_are_not_there_are_refused():
    layout = ParallelLayout(tp=2, dp=2)
    with pytest.raises(ValueError, match="rank 4 is outside a layout of 4 ranks"):
        layout.coords(4)
    with pytest.raises(ValueError, match="outside"):
        layout.coords(-1)
    with pytest.raises(ValueError, match=r"tp rank 2 is outside 0\.\.1"):
        layout.rank(tp=2)
    with pytest.raises(ValueError, match="unknown axis 'xp'"):
        layout.groups("xp")
    with pytest.raises(ValueError, match="unknown kind of group 'dp'"):
        generation_layout(layout).groups("dp")


def test_generation_sizes_that_do_not_divide_the_ranks_are_refused_with_both_numbers():
    with pytest.raises(ValueError, match=r"pp 1 x tp 3 = 3 ranks do not divide the 8 ranks"):
        generation_layout(ParallelLayout(dp=8), tp=3)
    with pytest.raises(ValueError, match="grouping must be"):
        generation_layout(ParallelLayout(dp=8), tp=2, grouping="random")
