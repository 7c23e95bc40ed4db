"""Many boxes at once, beside an account of every element."""

from __future__ import annotations

from helpers.brute import mask
from hypothesis import given, strategies as st

from hybridflow.core.resharding.boxes import covers, disjoint, overlaps
from hybridflow.core.values.weights import Box

SHAPE = (5, 4, 3)


@st.composite
def boxes(draw, least: int = 0) -> Box:
    """Any box of SHAPE, at least so long in each dimension."""
    starts = [draw(st.integers(0, size - least)) for size in SHAPE]
    stops = [
        draw(st.integers(start + least, size)) for start, size in zip(starts, SHAPE, strict=True)
    ]
    return Box(tuple(starts), tuple(stops))


@given(st.lists(boxes(), max_size=5))
def test_boxes_are_disjoint_where_no_element_is_in_two(many):
    assert disjoint(many) == (mask(SHAPE, many).max() <= 1)


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 3)), max_size=6))
def test_rows_of_one_parameter_are_disjoint_by_their_ends(runs):
    rows = [Box((start, 0), (start + count, 3)) for start, count in runs]
    assert disjoint(rows) == (mask((11, 3), rows).max() <= 1)


def test_twins_share_everything_and_scalars_have_one_element():
    whole, scalar = Box.full(SHAPE), Box((), ())
    assert not disjoint([whole, whole])
    assert disjoint([scalar])
    assert not disjoint([scalar, scalar])
    assert disjoint([])


@given(st.lists(boxes(least=1), max_size=6), boxes(least=1))
def test_those_that_touch_a_box_are_numbered_in_order(many, one):
    own = mask(SHAPE, [one])
    assert overlaps(many)(one) == [
        at for at, box in enumerate(many) if (mask(SHAPE, [box]) * own).any()
    ]


@given(boxes(least=1), st.lists(boxes(), max_size=4))
def test_what_parts_leave_open_is_told_once(box, parts):
    left = mask(SHAPE, covers(box, parts))
    assert (left == mask(SHAPE, [box]) * (mask(SHAPE, parts) == 0)).all()
