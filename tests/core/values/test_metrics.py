"""Metrics add up the same, however rows were split."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given, strategies as st

from hybridflow.core.values.metrics import Metrics

values = st.floats(-1e6, 1e6)


@given(st.lists(values, min_size=1, max_size=20), st.integers(1, 5))
def test_means_and_maxima_do_not_depend_on_the_split(numbers, parts):
    pieces = [numbers[i::parts] for i in range(parts)]
    merged = Metrics.merge(
        Metrics({"x": (sum(p), len(p))}, {"top": max(p)} if p else {}) for p in pieces
    )  # a part without rows counts nothing
    assert merged["x"] == pytest.approx(sum(numbers) / len(numbers), abs=1e-3)
    assert merged["top"] == max(numbers)


def test_a_mean_without_any_count_is_left_out():
    empty = Metrics({"x": (0.0, 0.0)})
    assert empty.values() == {} and "x" in empty
    with pytest.raises(KeyError):
        empty["x"]


def test_merging_nothing_is_nothing_and_false():
    assert not Metrics.merge([]) and not Metrics() and Metrics.of(a=0.0)


def test_merging_leaves_the_parts_as_they_are():
    a, b = Metrics({"x": (1.0, 1.0)}), Metrics({"x": (3.0, 1.0)})
    assert Metrics.merge([a, b])["x"] == 2.0
    assert a["x"] == 1.0 and b["x"] == 3.0


def test_a_prefix_names_means_and_maxima():
    assert Metrics({"x": (4.0, 2.0)}, {"y": 5.0}).prefixed("actor/").values() == {
        "actor/x": 2.0,
        "actor/y": 5.0,
    }


def test_a_spread_is_that_of_the_values_of_all_parts():
    halves = [Metrics(spreads={"x": range(0, 6)}), Metrics(spreads={"x": []})]
    merged = Metrics.merge([*halves, Metrics(spreads={"x": [6, 10, 9, 8, 7]})]).prefixed("a/")
    # 0 to 10: the variance of n equal steps is (n^2 - 1) / 12
    assert merged.values() == pytest.approx(
        {
            "a/x_std": 10**0.5,
            "a/x_min": 0.0,
            "a/x_p10": 1.0,
            "a/x_p50": 5.0,
            "a/x_p90": 9.0,
            "a/x_max": 10.0,
        }
    )


def test_a_spread_of_nothing_is_left_out():
    nothing = Metrics(spreads={"x": []})
    assert nothing.values() == {} and Metrics.merge([nothing, nothing]).values() == {}


def test_metrics_survive_pickling():
    there = pickle.loads(pickle.dumps(Metrics({"x": (4.0, 2.0)}, {"y": 5.0}, {"z": [1, 2]})))
    assert there.means == {"x": (4.0, 2.0)} and there.maxima == {"y": 5.0}
    assert there.spreads["z"].tolist() == [1.0, 2.0]
