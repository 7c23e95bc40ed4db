"""What a weight update lacks, counted by hand."""

from __future__ import annotations

import pytest

from hybridflow.core.errors import HybridFlowError
from hybridflow.core.values.weights import Box
from hybridflow.kit.arrivals import Arrivals

ROWS = [Box((row, 0), (row + 1, 3)) for row in range(4)]
B = Box((0,), (5,))
HELD = {
    "a": (Box((0, 0), (1, 3)), Box((2, 0), (4, 3))),
    "b": (B,),
    "none": (),
    "empty": (Box((2,), (2,)),),
}


@pytest.fixture
def arrivals() -> Arrivals:
    return Arrivals(HELD)


def test_all_that_is_taken_makes_an_update_whole(arrivals):
    arrivals.note("b", B)
    arrivals.note("a", Box((0, 0), (3, 3)))  # more than it takes: row 1 is not its own
    assert arrivals.whole("b") and not arrivals.whole("a")
    arrivals.note("a", ROWS[3])
    assert arrivals.whole("a") and arrivals.whole("none") and arrivals.whole("empty")
    arrivals.check()


@pytest.mark.parametrize(
    ("came", "said"),
    [
        ([], "lacks 2 of 2 parameters: a, b"),
        ([("b", B)], "lacks 1 of 2 parameters: a"),
        ([("b", B), ("a", ROWS[2]), ("a", ROWS[0])], r"1 of 2 parameters: a \(6 of 9 elements came\)"),
        ([("a", ROWS[1]), ("other", B)], "lacks 2 of 2 parameters: a, b"),
    ],
    ids=["nothing", "one parameter", "two of three rows", "what it does not take"],
)  # fmt: skip
def test_every_update_must_bring_every_element(arrivals, came, said):
    for name, box in came:
        arrivals.note(name, box)
    with pytest.raises(HybridFlowError, match=said):
        arrivals.check()


@pytest.mark.parametrize("again", [ROWS[2], Box((1, 1), (4, 2))], ids=["a box", "a part of one"])
def test_what_comes_twice_does_not_make_up_for_what_is_missing(arrivals, again):
    arrivals.note("a", ROWS[2])
    with pytest.raises(HybridFlowError, match="brought elements of a twice"):
        arrivals.note("a", again)


def test_long_lists_are_cut():
    with pytest.raises(HybridFlowError, match=r"lacks 5 of 5 parameters: 0, 1, 2, \.\.\.$"):
        Arrivals({str(number): (B,) for number in range(5)}).check()
