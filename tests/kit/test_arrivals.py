"""What a weight update lacks, counted by hand."""

from __future__ import annotations

import pytest

from hybridflow.core.errors import HybridFlowError
from hybridflow.core.values.weights import Box
from hybridflow.kit.arrivals import Arrivals

ROWS = [Box((row, 0), (row + 1, 3)) for row in range(4)]
HELD = {
    0: {"a": (Box((0, 0), (2, 3)),), "b": (Box((0,), (5,)),), "apart": (Box((0,), (1,)),)},
    1: {"a": (Box((2, 0), (4, 3)),), "b": ()},
}


@pytest.fixture
def arrivals() -> Arrivals:
    return Arrivals(HELD, {"apart"})


def bring_all(arrivals: Arrivals) -> None:
    for row in (0, 1):
        arrivals.note(0, "a", ROWS[row])
    arrivals.note(0, "b", Box((0,), (5,)))
    arrivals.note(1, "a", Box((0, 0), (4, 3)))  # more than it takes


def test_all_that_is_taken_makes_an_update_whole(arrivals):
    bring_all(arrivals)
    arrivals.check(complete=False)
    assert set(arrivals.lacks.values()) == {0}


def test_a_first_update_must_bring_everything(arrivals):
    arrivals.note(0, "a", Box((0, 0), (2, 3)))
    with pytest.raises(HybridFlowError, match="the first weight update lacks 2 of 2 parameters"):
        arrivals.check(complete=False)


def test_a_later_one_may_bring_some_parameters_alone(arrivals):
    arrivals.note(0, "b", Box((0,), (5,)))
    arrivals.check(complete=True)


def test_no_update_may_bring_a_part_of_a_parameter(arrivals):
    arrivals.note(1, "a", ROWS[2])
    with pytest.raises(HybridFlowError, match="brought only 3 of 6 elements of a"):
        arrivals.check(complete=True)


def test_what_a_rank_does_not_take_counts_for_nothing(arrivals):
    arrivals.note(1, "b", Box((0,), (5,)))
    arrivals.note(0, "apart", Box((0,), (1,)))
    arrivals.note(0, "a", ROWS[3])
    assert arrivals.lacks == {(0, "a"): 6, (0, "b"): 5, (1, "a"): 6}
