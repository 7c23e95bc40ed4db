"""How the kit fails: three parts, the worst entry, and what an author has to give."""

from __future__ import annotations

import pytest
import torch

from hybridflow.kit import testing
from hybridflow.kit.testing.checks import missing_fixture, require, require_close, require_raises

pytest_plugins = "pytester"


def close(got, expected, tolerance, relative=False):
    require_close(
        torch.as_tensor(got),
        torch.as_tensor(expected),
        tolerance,
        what="weights",
        likely="transposed",
        relative=relative,
    )


def raises(call, kind=ValueError):
    return require_raises(call, kind, what="a bad option", likely="it is ignored")


def test_a_failure_has_its_three_parts_each_in_a_line():
    require(1, got="1", expected="2", likely="no matter")
    with pytest.raises(AssertionError) as failure:
        require([], got="1", expected="2", likely="a sum over nothing")
    lines = str(failure.value).splitlines()
    assert lines == ["", "  got: 1", "  expected: 2", "  likely cause: a sum over nothing"]


def test_numbers_as_far_apart_as_the_tolerance_pass_and_the_worst_of_others_is_named():
    close([[1.0, 2.0], [3.0, 4.5]], [[1.0, 2.0], [3.0, 4.0]], 0.5)
    with pytest.raises(AssertionError, match=r"weights: 4\.5 at entry 3 of shape \(2, 2\)"):
        close([[1.0, 2.25], [3.0, 4.5]], [[1.0, 2.0], [3.0, 4.0]], 0.2)


def test_a_relative_tolerance_is_of_the_largest_expected_entry():
    close([100.0, 0.9], [100.0, 0.0], 0.01, relative=True)
    with pytest.raises(AssertionError, match="0 within 1"):
        close([100.0, 1.1], [100.0, 0.0], 0.01, relative=True)


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_what_is_no_number_is_never_close(odd):
    with pytest.raises(AssertionError, match=f"weights: {odd} at entry 1"):
        close([1.0, odd], [1.0, 2.0], 1e9)


def test_other_shapes_are_told_and_no_entries_are_equal():
    close(torch.zeros(0, 3), torch.zeros(0, 3), 0.0)
    with pytest.raises(AssertionError, match=r"(?s)shape \(3,\).*shape \(3, 1\).*transposed"):
        close(torch.zeros(3), torch.zeros(3, 1), 1.0)


def test_the_error_that_was_asked_for_is_given_back():
    assert raises(lambda: int("x")).args == ("invalid literal for int() with base 10: 'x'",)


def test_another_error_or_none_is_told():
    with pytest.raises(AssertionError, match=r"(?s)raised KeyError\('x'\).*a ValueError.*ignored"):
        raises(lambda: {}["x"])
    with pytest.raises(AssertionError, match="a bad option gave 7"):
        raises(lambda: 7)


def test_a_missing_fixture_names_the_class_and_what_to_give():
    class TestMine:
        pass

    with pytest.raises(NotImplementedError, match="TestMine needs a pytest fixture `loss` that"):
        missing_fixture(TestMine(), "loss", "your Loss")


SUITES = [name for name in testing.__all__ if name.endswith("Conformance")]


def test_every_suite_says_that_it_lacks_its_fixture(pytester):
    lines = ["from hybridflow.kit import testing"]
    lines += [f"class Test{suite}(testing.{suite}): pass" for suite in SUITES]
    pytester.makepyfile("\n".join(lines))
    result = pytester.runpytest_inprocess("-q", "-p", "no:cacheprovider", "-p", "no:xdist")
    # Of a training backend without a class the tests over ranks are left out.
    assert result.parseoutcomes() == {"errors": result.parseoutcomes()["errors"], "skipped": 4}
    told = "\n".join(result.outlines)
    for suite in set(SUITES) - {"TransportConformance"}:
        assert f"NotImplementedError: Test{suite} needs a pytest fixture `" in told
    assert "Error: give a fixture `transport`" in told
