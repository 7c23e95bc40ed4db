"""Whether counts are what probabilities say: chi-square against values by hand and by scipy."""

from __future__ import annotations

from math import exp
from statistics import NormalDist

import numpy as np
import pytest

from hybridflow.kit.testing.statistics import chi_square_score


@pytest.mark.parametrize("counts", [[105, 100, 95], [120, 90, 90], [150, 100, 50]])
def test_the_score_of_two_degrees_is_the_normal_quantile_of_the_same_tail(counts):
    """With two degrees the tail of chi-square beyond x is exp(-x / 2)."""
    x = sum((count - 100) ** 2 / 100 for count in counts)
    expected = NormalDist().inv_cdf(1 - exp(-x / 2))
    assert chi_square_score(np.array(counts), np.full(3, 1 / 3)) == pytest.approx(expected, rel=0.1)


def test_the_score_of_many_cells_is_that_of_scipy():
    stats = pytest.importorskip("scipy.stats")
    counts = np.random.default_rng(0).multinomial(20_000, np.full(30, 1 / 30))
    tail = stats.chisquare(counts).pvalue
    expected = stats.norm.isf(tail)
    assert chi_square_score(counts, np.full(30, 1 / 30)) == pytest.approx(expected, abs=0.01)


def test_a_biased_draw_is_far_off_and_a_fair_one_is_not():
    fair = np.array([0.5, 0.3, 0.2])
    biased = np.array([0.45, 0.3, 0.25])
    random = np.random.default_rng(1)
    assert abs(chi_square_score(random.multinomial(5000, fair), fair)) < 3
    assert chi_square_score(random.multinomial(5000, biased), fair) > 5


def test_cells_that_are_hardly_ever_hit_are_taken_together():
    """Of 100 draws a hundred cells of 0.001 expect 0.1 each, and 10 together, which came."""
    probabilities = np.array([0.9, *[0.001] * 100])
    counts = np.zeros(101)
    counts[0] = 90
    counts[1] = 10
    assert chi_square_score(counts, probabilities) < 0
    counts[0] = 60
    counts[1] = 40
    assert chi_square_score(counts, probabilities) > 5


def test_what_has_no_probability_must_never_come():
    assert chi_square_score(np.array([99, 1]), np.array([1.0, 0.0])) == float("inf")


def test_one_cell_alone_says_nothing():
    assert chi_square_score(np.array([100, 0]), np.array([1.0, 0.0])) == 0.0
