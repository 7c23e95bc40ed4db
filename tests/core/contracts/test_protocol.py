"""The tables of the eight protocols, exactly: who gets which rows, whose results count."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from hybridflow.core.contracts.protocol import BUILT_IN, Protocol
from hybridflow.core.errors import HybridFlowError
from hybridflow.core.values.batch import Batch
from hybridflow.core.values.columns import tokens
from hybridflow.core.values.metrics import Metrics
from hybridflow.core.values.parallel import ParallelLayout, generation_layout


@attrs.frozen
class Group:
    """A group as a protocol sees it."""

    layout: ParallelLayout
    generation: object = None


@st.composite
def groups(draw):
    """Layouts up to pp 3, tp 4, dp 4, cp 2, in both orders, with generation sizes that divide pp and tp."""
    pp, tp = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    order = draw(st.sampled_from(["tp-cp-pp-dp", "tp-cp-dp-pp"]))
    layout = ParallelLayout(
        pp=pp, tp=tp, dp=draw(st.integers(1, 4)), cp=draw(st.integers(1, 2)), order=order
    )
    pp_g = draw(st.sampled_from([i for i in range(1, pp + 1) if pp % i == 0]))
    tp_g = draw(st.sampled_from([i for i in range(1, tp + 1) if tp % i == 0]))
    return Group(layout, generation_layout(layout, pp_g, tp_g))


counts = st.integers(0, 17)


def batch_of(rows):
    return Batch(
        {
            "n": torch.arange(rows),
            "ids": tokens([[n] * (n % 3) for n in range(rows)], torch.int64),
            "meta": [{"n": n} for n in range(rows)],
        }
    )


def numbers(batch):
    assert [m["n"] for m in batch["meta"].values] == batch["n"].values.tolist()
    assert [len(r) for r in batch["ids"]] == [n % 3 for n in batch["n"].values.tolist()]
    return batch["n"].values.tolist()


def where(layout, rank):
    """The coordinates of a rank, counted by hand: the first axis of the order runs fastest."""
    at = {}
    for axis in layout.order.split("-"):
        rank, at[axis] = divmod(rank, getattr(layout, axis))
    return at


def rank_at(layout, **at):
    return next(
        r
        for r in range(layout.world)
        if all(v == at.get(a, 0) for a, v in where(layout, r).items())
    )


def cut(rows, parts):
    return [part.tolist() for part in np.array_split(np.arange(rows), parts)]


def check(protocol, group, rows, parts, part_of, sources):
    """Every rank has its part of the rows, the results come from `sources`, and together are the input."""
    pieces = protocol.distribute(group, batch_of(rows))
    expected = cut(rows, parts)
    assert list(protocol.called(group)) == list(range(group.layout.world))
    for rank in range(group.layout.world):
        assert numbers(pieces[rank]) == expected[part_of(rank)]
    assert list(protocol.sources(group)) == sources
    back = protocol.collect(group, [pieces[rank] for rank in sources])
    assert numbers(back) == list(range(rows))


@settings(deadline=None)
@given(groups(), counts)
def test_three_d_splits_along_dp_and_collects_from_the_last_stage(group, rows):
    layout = group.layout
    sources = [rank_at(layout, dp=dp, pp=layout.pp - 1) for dp in range(layout.dp)]
    check(Protocol.THREE_D, group, rows, layout.dp, lambda rank: where(layout, rank)["dp"], sources)


@settings(deadline=None)
@given(st.integers(1, 6), counts)
def test_dp_gives_each_rank_a_part(ranks, rows):
    group = Group(ParallelLayout(dp=ranks))
    check(Protocol.DP, group, rows, ranks, lambda rank: rank, list(range(ranks)))


@settings(deadline=None)
@given(groups(), counts)
def test_micro_dp_gives_each_generation_replica_a_part_dp_major(group, rows):
    layout, generation = group.layout, group.generation
    fold_p, fold_t = layout.pp // generation.pp, layout.tp // generation.tp

    def part_of(rank):
        at = where(layout, rank)
        return ((at["dp"] * layout.cp + at["cp"]) * fold_p + at["pp"] % fold_p) * fold_t + at[
            "tp"
        ] % fold_t

    sources = [
        rank_at(layout, dp=dp, cp=cp, pp=(generation.pp - 1) * fold_p + p, tp=t)
        for dp in range(layout.dp)
        for cp in range(layout.cp)
        for p in range(fold_p)
        for t in range(fold_t)
    ]
    check(Protocol.MICRO_DP, group, rows, len(sources), part_of, sources)


@settings(deadline=None)
@given(groups(), counts)
def test_pp_as_dp_makes_replicas_of_pipeline_stages(group, rows):
    layout = group.layout

    def part_of(rank):
        at = where(layout, rank)
        return at["dp"] * layout.pp + at["pp"]

    sources = [rank_at(layout, dp=dp, pp=pp) for dp in range(layout.dp) for pp in range(layout.pp)]
    check(Protocol.PP_AS_DP, group, rows, layout.dp * layout.pp, part_of, sources)


@settings(deadline=None)
@given(groups(), counts)
def test_one_to_all_gives_everybody_everything_and_returns_all_results(group, rows):
    batch = batch_of(rows)
    pieces = Protocol.ONE_TO_ALL.distribute(group, batch)
    assert [p is batch for p in pieces] == [True] * group.layout.world
    sources = list(Protocol.ONE_TO_ALL.sources(group))
    assert sources == list(Protocol.ONE_TO_ALL.called(group)) == list(range(group.layout.world))
    assert Protocol.ONE_TO_ALL.collect(group, sources) == sources


@settings(deadline=None)
@given(groups(), counts)
def test_pp_only_returns_one_result_of_each_stage(group, rows):
    batch, layout = batch_of(rows), group.layout
    assert all(p is batch for p in Protocol.PP_ONLY.distribute(group, batch))
    assert list(Protocol.PP_ONLY.called(group)) == list(range(layout.world))
    sources = list(Protocol.PP_ONLY.sources(group))
    assert sources == [rank_at(layout, pp=stage) for stage in range(layout.pp)]
    assert Protocol.PP_ONLY.collect(group, ["embedding", "head"]) == ["embedding", "head"]


@settings(deadline=None)
@given(groups(), counts)
def test_rank_zero_is_called_alone_and_its_result_is_the_result(group, rows):
    pieces = Protocol.RANK_ZERO.distribute(group, batch_of(rows))
    assert list(Protocol.RANK_ZERO.called(group)) == list(Protocol.RANK_ZERO.sources(group)) == [0]
    assert numbers(Protocol.RANK_ZERO.collect(group, [pieces[0]])) == list(range(rows))


@settings(deadline=None)
@given(groups(), counts)
def test_all_to_all_gives_each_rank_the_callers_entry(group, rows):
    world = group.layout.world
    entries = [batch_of(rows) for _ in range(world)]
    pieces = Protocol.ALL_TO_ALL.distribute(group, entries)
    assert [p is e for p, e in zip(pieces, entries, strict=True)] == [True] * world
    assert list(Protocol.ALL_TO_ALL.sources(group)) == list(range(world))
    assert Protocol.ALL_TO_ALL.collect(group, list(pieces)) == entries
    with pytest.raises(
        HybridFlowError, match=f"each of the {world} ranks, got {world + 1} entries"
    ):
        Protocol.ALL_TO_ALL.distribute(group, [*entries, entries[0]])


def test_all_to_all_refuses_what_is_no_list():
    with pytest.raises(HybridFlowError, match="got Batch"):
        Protocol.ALL_TO_ALL.distribute(Group(ParallelLayout(dp=2)), batch_of(2))


def test_dp_refuses_groups_with_other_axes_and_says_what_to_use():
    with pytest.raises(HybridFlowError, match="got dp2-tp2; use THREE_D"):
        Protocol.DP.distribute(Group(ParallelLayout(tp=2, dp=2)), batch_of(4))


def test_micro_dp_refuses_groups_without_a_generation_layout():
    with pytest.raises(HybridFlowError, match="needs a group with a generation layout"):
        Protocol.MICRO_DP.distribute(Group(ParallelLayout(dp=2)), batch_of(4))


def test_fsdp_over_eight_ranks_generates_on_four_replicas_of_neighbours():
    layout = ParallelLayout(dp=8)
    group = Group(layout, generation_layout(layout, tp=2))
    check(Protocol.MICRO_DP, group, 10, 4, lambda rank: rank % 4, [0, 1, 2, 3])
    group = Group(layout, generation_layout(layout, tp=2, grouping="consecutive"))
    check(Protocol.MICRO_DP, group, 10, 4, lambda rank: rank // 2, [0, 2, 4, 6])


@pytest.mark.parametrize(
    "protocol", [p for p in BUILT_IN if p is not Protocol.ALL_TO_ALL], ids=lambda p: p.name
)
def test_what_is_no_batch_is_the_same_for_every_rank(protocol):
    group = Group(ParallelLayout(dp=4), generation_layout(ParallelLayout(dp=4), tp=2))
    assert list(protocol.distribute(group, {"lr": 1.0})) == [{"lr": 1.0}] * 4


@pytest.mark.parametrize("protocol", [p for p in BUILT_IN if p.splits], ids=lambda p: p.name)
def test_splitting_protocols_merge_metrics_and_list_what_else_is_returned(protocol):
    layout = ParallelLayout(dp=2)
    group = Group(layout, generation_layout(layout))
    merged = protocol.collect(group, [Metrics({"x": (1.0, 1.0)}), Metrics({"x": (5.0, 3.0)})])
    assert merged["x"] == 1.5
    assert protocol.collect(group, [1, 2]) == [1, 2] and protocol.collect(group, [None, None]) == [
        None,
        None,
    ]


@pytest.mark.parametrize("protocol", [p for p in BUILT_IN if p.splits], ids=lambda p: p.name)
def test_units_are_never_cut(protocol):
    layout = ParallelLayout(dp=4)
    group = Group(layout, generation_layout(layout))
    units = np.repeat([3, 1, 2, 0, 5], [2, 3, 1, 4, 2])
    pieces = protocol.distribute(group, batch_of(12).whole(units))
    seen = [set(units[numbers(pieces[rank])]) for rank in protocol.sources(group)]
    assert sum(len(s) for s in seen) == 5 and set.union(*seen) == {0, 1, 2, 3, 5}
