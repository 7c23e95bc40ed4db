"""Elements without a source, elements with two, and values that nobody takes."""

from __future__ import annotations

import torch

from hybridflow.core.values.weights import Box, Param
from hybridflow.kit.tracing.coverage import uncovered, unfilled, untaken
from hybridflow.kit.tracing.tracer import LoaderMap
from hybridflow.kit.tracing.windows import Window

TENSORS = {"w": torch.zeros(3, 4), "b": torch.zeros(8).as_strided((2, 2), (4, 1), 2)}


def rows(first: int, count: int) -> Window:
    """Rows of "w"."""
    return Window("w", 4 * first, (count, 4), (4, 1))


def map_of(*windows: Window, fills: tuple[Window, ...] = (), opaque: bool = False) -> LoaderMap:
    pieces = {"a": tuple((Box.full(window.size), window) for window in windows)}
    return LoaderMap(
        pieces,
        tuple((window, 0.0) for window in fills),
        {"x": "computed"} if opaque else {},
        {"a": frozenset({window.tensor for window in windows}), "x": frozenset({"w"})},
    )


def test_windows_and_fills_that_make_up_the_tensor_leave_nothing_out():
    assert list(uncovered(map_of(rows(0, 3)), TENSORS)) == []
    assert list(uncovered(map_of(rows(0, 2), fills=(rows(2, 1),)), TENSORS)) == []
    # A loader may write zeros first, and values over them.
    assert list(uncovered(map_of(rows(0, 2), fills=(rows(0, 3),)), TENSORS)) == []


def test_an_element_without_a_source_is_told():
    [told] = uncovered(map_of(rows(0, 2)), TENSORS)
    assert told == "nothing gives 4 of 12 elements of w their values"


def test_an_element_with_two_sources_is_told():
    [told] = uncovered(map_of(rows(0, 2), rows(1, 2)), TENSORS)
    assert told == "two values come to one element of w"


def test_a_tensor_whose_storage_is_larger_than_it_is_counted_alone():
    assert list(uncovered(map_of(Window("b", 0, (2, 2), (4, 1))), TENSORS)) == []
    [told] = uncovered(map_of(Window("b", 0, (1, 2), (4, 1))), TENSORS)
    assert told == "nothing gives 2 of 4 elements of b their values"


def test_what_an_opaque_parameter_is_computed_into_is_left_out():
    assert list(uncovered(map_of(rows(0, 2), opaque=True), TENSORS)) == []


def test_what_no_rank_takes_is_told_with_its_size():
    params = {"a": Param((4, 2), torch.float32), "b": Param((3,), torch.float32)}
    halves = {"a": (Box((0, 0), (4, 1)),)}, {"a": (Box((0, 1), (3, 2)),), "b": (Box((0,), (3,)),)}
    assert list(untaken(params, halves)) == [("a", 1)]
    assert list(untaken(params, halves[:1])) == [("a", 4), ("b", 3)]
    whole = {"a": (Box.full((4, 2)),), "b": (Box.full((3,)),)}
    assert list(untaken(params, [whole, whole])) == []


def test_a_parameter_without_a_source_is_named_but_not_a_tied_one_or_a_buffer():
    one, two = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))
    tied = torch.nn.Parameter(one.data)
    tensors = {"one": one, "tied": tied, "two": two, "scale": torch.ones(1)}
    assert list(unfilled(tensors, {"one"})) == ["two"]
    assert list(unfilled(tensors, {"tied", "two"})) == []
