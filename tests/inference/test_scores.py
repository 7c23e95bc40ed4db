"""Figures of scores against counting: every subset, every vote, every bootstrap sample."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from hybridflow.inference.scores import difference, figure, majority_score, pass_at_k


@pytest.mark.parametrize("samples, right", [(1, 0), (1, 1), (5, 0), (5, 2), (5, 5), (6, 1), (7, 3)])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(samples, right):
    responses = [True] * right + [False] * (samples - right)
    for k in range(1, samples + 1):
        subsets = list(itertools.combinations(responses, k))
        share = sum(any(subset) for subset in subsets) / len(subsets)
        assert pass_at_k(samples, right, k) == pytest.approx(share, abs=1e-12)


@pytest.mark.parametrize("k", [0, 5])
def test_pass_at_k_of_more_than_there_are_is_refused(k):
    with pytest.raises(ValueError, match="from 1 to the number of samples, 4"):
        pass_at_k(4, 2, k)


@pytest.mark.parametrize(
    "answers, scores, expected",
    [
        (["7", "7", "8"], [1.0, 1.0, 0.0], 1.0),
        (["7", "8", "8"], [1.0, 0.0, 0.0], 0.0),
        (["7", "8"], [1.0, 0.0], 0.5),  # a tie counts each alike
        (["7", "8", "8", "9", "9"], [1.0, 0.0, 0.0, 1.0, 1.0], 0.5),
        ([None, None, "7"], [0.0, 0.0, 1.0], 1.0),  # no answer is no vote
        ([None, None], [0.0, 0.5], 0.0),
    ],
)
def test_the_majority_by_hand(answers, scores, expected):
    assert majority_score(answers, scores) == expected


def exact(values) -> tuple[float, float]:
    """The middle 95% of the means of all samples with replacement, each as likely."""
    means = sorted(np.mean(drawn) for drawn in itertools.product(values, repeat=len(values)))
    low, high = np.quantile(means, [0.025, 0.975], method="inverted_cdf")
    return float(low), float(high)


@pytest.mark.parametrize(
    "values", [[0, 1], [0, 0, 0, 1], [0, 1, 1, 1, 1], [0.0, 0.25, 0.5, 1.0, 3.0, 3.0]]
)
def test_the_interval_is_that_of_all_bootstrap_samples(values):
    result = figure(values)
    assert result.mean == pytest.approx(np.mean(values)) and result.rows == len(values)
    assert (result.low, result.high) == pytest.approx(exact(values), abs=0.02)


def test_by_hand_of_three_zeros_and_a_one_at_most_three_of_four_are_ones():
    # P(4 ones) = 1/256 and P(3 or 4) = 13/256 = 0.051: 0.025 lies between; P(none) = 81/256.
    result = figure([0, 0, 0, 1])
    assert (result.low, result.high) == (0.0, 0.75)


def test_differences_are_of_the_same_rows():
    # Unpaired, these would overlap; row by row the first is better by 0.1 each time.
    first = [0.1, 0.5, 0.9, 1.1]
    second = [0.0, 0.4, 0.8, 1.0]
    result = difference(first, second)
    assert (result.mean, result.low, result.high) == pytest.approx((0.1, 0.1, 0.1))


def test_many_rows_are_drawn_in_pieces(monkeypatch):
    whole = figure(list(range(50)))
    monkeypatch.setattr("hybridflow.inference.scores.AT_ONCE", 120)
    assert figure(list(range(50))) == whole
