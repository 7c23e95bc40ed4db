"""The reward "exact_match"."""

from __future__ import annotations

import numpy as np
import pytest

from hybridflow.backends.rewards.exact_match import ExactMatch
from hybridflow.core.contracts.reward import RewardSample
from hybridflow.core.errors import RewardError
from hybridflow.core.workers.scoring import score_samples


def score(response, answer, **options):
    samples = [RewardSample("17+05=", response, np.zeros(1, np.int64), {"answer": answer})]
    return score_samples(ExactMatch(**options), samples, "exact_match")[0]


def test_only_the_whole_answer_counts_and_white_space_around_it_does_not():
    assert score(" 022\n", "022") == 1
    assert score("22", "022") == 0
    assert score("0220", "022") == 0
    assert score("", "022") == 0
    assert score("22", 22) == 1


def test_case_counts_unless_told_otherwise():
    assert score("Yes", "yes") == 0
    assert score("Yes", "yes", ignore_case=True) == 1


def test_a_row_without_an_answer_says_what_to_set():
    samples = [RewardSample("17+05=", "022", np.zeros(1, np.int64), {"solution": "022"})]
    with pytest.raises(
        RewardError,
        match=r"set data\.answer.*row 0",
    ):
        score_samples(ExactMatch(), samples, "exact_match")


def test_the_answer_is_the_response_as_it_is_compared():
    sample = RewardSample("", " Yes\n", np.zeros(1, np.int64), {"answer": "yes"})
    assert ExactMatch().answer(sample) == "Yes"
    assert ExactMatch(ignore_case=True).answer(sample) == "yes"
