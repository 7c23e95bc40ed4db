"""A resharding plan's figures as text: a line for each rank, the largest, and the totals."""

from __future__ import annotations

import re

from helpers.brute import layout, whole

from hybridflow.cli.explain import explain
from hybridflow.core.resharding.plan import ReshardPlan, plan_reshard
from hybridflow.core.values.weights import Box

ROWS, COLUMNS = 960, 10
"""Of the only parameter, float32: 38.40 kB."""


def gathered(ranks: int) -> ReshardPlan:
    """Each rank has as many rows as the others, and wants all."""
    rows = ROWS // ranks
    have = {
        rank: {"a": (Box((rows * rank, 0), (rows * rank + rows, COLUMNS)),)}
        for rank in range(ranks)
    }
    want = {rank: {"a": whole((ROWS, COLUMNS))} for rank in range(ranks)}
    shapes = {"a": (ROWS, COLUMNS)}
    return plan_reshard(layout(shapes, have), layout(shapes, want))


def cells(text: str) -> list[list[str]]:
    return [re.split(r"  +", line.strip()) for line in text.splitlines()]


def test_each_rank_has_a_line_and_the_most_of_each_figure_stands_below():
    lines = cells(explain(gathered(2)))
    assert lines[0] == [
        "rank",
        "receives",
        "sends",
        "aliased",
        "copied locally",
        "peak weights",
        "redundant",
    ]
    figures = [
        "19.20 kB",
        "19.20 kB",
        "19.20 kB",
        "0 B",
        "38.40 kB",
        "0 B",
    ]  # one half comes, one is there
    assert lines[1:4] == [["0", *figures], ["1", *figures], ["most", *figures]]


def test_the_totals_are_told():
    text = explain(gathered(2))
    assert "38.40 kB over 2 transfers of 1 parameters, in buckets of at most 64.00 MB" in text


def test_ranks_beyond_the_limit_are_left_out():
    firsts = [line[0] for line in cells(explain(gathered(4), limit=2))]
    assert firsts[:5] == ["rank", "0", "1", "...", "most"]
    assert [line[0] for line in cells(explain(gathered(4)))][:6] == [
        "rank",
        "0",
        "1",
        "2",
        "3",
        "most",
    ]


def test_no_copy_and_what_is_copied_are_told_apart():
    """Rank 0 keeps what it has; rank 1 has twice what it wants."""
    shapes = {"a": (4, 10)}
    have = {0: {"a": (Box((0, 0), (2, 10)),)}, 1: {"a": whole((4, 10))}}
    want = {0: {"a": (Box((0, 0), (2, 10)),)}, 1: {"a": (Box((2, 0), (4, 10)),)}}
    opaque = layout(shapes, want, opaque=frozenset({"a"}))
    aliased = cells(explain(plan_reshard(layout(shapes, have), layout(shapes, want))))
    assert aliased[1:3] == [
        ["0", "0 B", "0 B", "80 B", "0 B", "80 B", "0 B"],
        ["1", "0 B", "0 B", "80 B", "0 B", "160 B", "80 B"],
    ]
    copied = cells(explain(plan_reshard(layout(shapes, have), opaque)))
    assert copied[1:3] == [
        ["0", "0 B", "0 B", "0 B", "80 B", "160 B", "0 B"],
        ["1", "0 B", "0 B", "0 B", "80 B", "240 B", "80 B"],
    ]
