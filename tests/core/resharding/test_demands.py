"""What receivers lack, and who sends it to them."""

from __future__ import annotations

from collections import Counter

import numpy as np
from helpers.brute import mask
from helpers.random_layouts import cuts
from hypothesis import given, strategies as st

from hybridflow.core.resharding.demands import common, deal, lacking
from hybridflow.core.values.weights import Box

SHAPE = (8, 3)
WHOLE = (Box.full(SHAPE),)
UPPER, LOWER = Box((0, 0), (4, 3)), Box((4, 0), (8, 3))


def found(have, want):
    """Of one parameter in float32: (box, wanters, holders, senders) of each demand."""
    demands, holes = lacking(("a",), 4, have, want)
    assert not holes
    return [(d.box, d.wanters.tolist(), set(d.holders), d.senders) for d in demands]


@given(cuts(SHAPE), cuts(SHAPE), st.data())
def test_what_two_lists_share_is_counted_by_element(mine, theirs, data):
    mine = [box for box in mine if data.draw(st.booleans())]
    assert common(mine, theirs) == int((mask(SHAPE, mine) * mask(SHAPE, theirs)).sum())
    assert common(mine, list(mine)) == int(mask(SHAPE, mine).sum())


def test_a_demand_names_who_wants_a_box_and_who_of_these_has_it():
    have = {0: (UPPER,), 1: (LOWER,), 5: (LOWER,)}
    assert found(have, {0: WHOLE, 5: (LOWER,), 9: WHOLE}) == [
        (UPPER, [0, 9], {0}, (0,)),
        (LOWER, [0, 9], set(), (1, 5)),  # rank 5 wants the lower half alone, and has it
    ]
    (upper, lower), _ = lacking(("a", "b"), 4, have, {0: WHOLE, 9: WHOLE})
    assert (upper.count, upper.nbytes) == (1, 2 * 12 * 4)
    assert (lower.count, lower.nbytes) == (2, 2 * 12 * 4 * 2)


def test_holdings_that_overlap_are_cut_so_that_each_piece_has_all_its_holders():
    middle = Box((2, 0), (5, 3))
    pieces = found({0: WHOLE, 1: (middle,)}, {2: WHOLE})
    assert {senders for _, _, _, senders in pieces} == {(0,), (0, 1)}
    shared = [box for box, _, _, senders in pieces if senders == (0, 1)]
    assert (mask(SHAPE, shared) == mask(SHAPE, [middle])).all()
    assert (mask(SHAPE, [box for box, *_ in pieces]) == 1).all()


def test_what_nobody_holds_is_told_with_the_first_rank_that_wants_it():
    demands, holes = lacking(("a",), 4, {0: (UPPER,)}, {7: WHOLE, 3: WHOLE})
    assert demands == []
    assert holes == [(LOWER, 3)]


def test_an_even_share_goes_to_each_of_those_that_have_it():
    have = {rank: WHOLE for rank in range(2)}
    demands, _ = lacking(("a",), 4, have, {rank: WHOLE for rank in range(2, 6)})
    (flow,) = deal(demands)
    assert list(flow.pairs()) == [(0, 2), (0, 3), (1, 4), (1, 5)]


def test_who_alone_has_a_part_sends_less_of_the_rest_and_boxes_are_cut_for_it():
    """Rank 0 alone has the upper half of `a`: 48 bytes. Both have `b` of 96: rank 0 sends 24 of them, rank 1 72."""
    first, _ = lacking(("a",), 4, {0: (UPPER,)}, {2: (UPPER,)})
    second, _ = lacking(("b",), 4, {0: WHOLE, 1: WHOLE}, {2: WHOLE})
    flows = list(deal(first + second))
    sent, arrived = Counter(), np.zeros(SHAPE, int)
    for flow in flows:
        ((sender, receiver),) = flow.pairs()
        assert receiver == 2
        sent[sender] += flow.nbytes * len(flow.names)
        if flow.names == ("b",):
            arrived += mask(SHAPE, [flow.box])
    assert sent == {0: 72, 1: 72}
    assert (arrived == 1).all()


def test_several_parameters_are_dealt_out_one_after_the_other():
    have = {0: WHOLE, 1: WHOLE, 2: WHOLE}
    demands, _ = lacking(("a", "b", "c", "d"), 4, have, {9: WHOLE})
    sent, arrived = Counter(), {name: np.zeros(SHAPE, int) for name in "abcd"}
    for flow in deal(demands):
        ((sender, _),) = flow.pairs()
        for name in flow.names:
            sent[sender] += flow.nbytes
            arrived[name] += mask(SHAPE, [flow.box])
    assert sent == {0: 128, 1: 128, 2: 128}
    assert all((elements == 1).all() for elements in arrived.values())
