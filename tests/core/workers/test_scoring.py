"""Rewards at work: one finite number for a sample or for each of its tokens, and errors that name the row."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hybridflow.core.contracts.reward import FunctionReward, Reward, RewardSample
from hybridflow.core.errors import RewardError
from hybridflow.core.workers.scoring import score_samples


def sample(response, prompt="1+1=", **meta):
    return RewardSample(prompt, response, np.arange(len(response)), meta)


def length(sample, scale=1.0):
    return len(sample.response) * scale


class Batched(Reward):
    """Gives what the test says."""

    def __init__(self, give):
        self.give = give

    def __call__(self, samples):
        return self.give(samples)


SAMPLES = [sample("a"), sample("bb"), sample("ccc")]


def test_a_function_is_called_with_each_sample():
    scores = score_samples(FunctionReward(length), SAMPLES, "length")
    assert scores.dtype == np.float32
    assert scores.tolist() == [1, 2, 3]
    assert score_samples(FunctionReward(length, scale=0.5), SAMPLES, "length").tolist() == [
        0.5,
        1,
        1.5,
    ]


def test_a_class_gets_all_samples_at_once():
    calls = []
    reward = Batched(lambda samples: calls.append(len(samples)) or range(len(samples)))
    assert score_samples(reward, SAMPLES, "batched").tolist() == [0, 1, 2]
    assert calls == [3]


def test_no_samples_give_no_scores():
    assert score_samples(FunctionReward(length), [], "length").shape == (0,)


@pytest.mark.parametrize(
    "make", [FunctionReward, lambda fn: Batched(lambda samples: [fn(s) for s in samples])]
)
def test_a_reward_that_raises_is_named_with_row_prompt_and_response(make):
    def fails(sample):
        return 1 / (len(sample.response) - 2)

    samples = [sample("a"), sample("bb", prompt="p" * 500), sample("ccc")]
    with pytest.raises(RewardError, match=r"'mine' raised ZeroDivisionError.*row 1") as caught:
        score_samples(make(fails), samples, "mine")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert len(str(caught.value)) < 300


def test_a_class_that_raises_only_for_rows_together_is_named_too():
    def together(samples):
        if len(samples) > 1:
            raise MemoryError("too many")
        return [0.0]

    with pytest.raises(RewardError, match="MemoryError for 3 rows"):
        score_samples(Batched(together), SAMPLES, "mine")


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, 1e300, 10**400, "1.0", None, [1.0], {}]
)
def test_what_is_no_finite_number_is_named(value):
    with pytest.raises(RewardError, match=r"'mine' returned .*row 1"):
        score_samples(
            FunctionReward(lambda s: value if s.response == "bb" else 0.0), SAMPLES, "mine"
        )


def test_numbers_of_every_kind_are_taken():
    values = [True, np.float64(0.5), torch.tensor(2.0)]
    assert score_samples(Batched(lambda s: values), SAMPLES, "mine").tolist() == [1, 0.5, 2]
    assert score_samples(Batched(lambda s: torch.arange(3)), SAMPLES, "mine").tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "given, words",
    [([1.0, 2.0], "2 values for 3 rows"), (1.0, "a list with one number"), (None, "list")],
)
def test_a_batch_of_the_wrong_size_is_refused(given, words):
    with pytest.raises(RewardError, match=words):
        score_samples(Batched(lambda s: given), SAMPLES, "mine")


WORDS = [
    RewardSample("p", "abc", np.array([4, 5, 6]), {}),
    RewardSample("p", "", np.array([], np.int64), {}),
]


def test_each_sample_gets_a_number_per_token_where_that_is_asked_for():
    own = FunctionReward(lambda sample: [float(token) for token in sample.response_ids])
    found = score_samples(own, WORDS, "own", per_token=True)
    assert [f.tolist() for f in found] == [[4, 5, 6], []] and found[0].dtype == np.float32


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([1.0, 2.0], "returned 2 numbers for 3 response tokens; return one for each"),
        (1.0, "one number for each of the 3 tokens"),
        ("abc", "returned 'abc'; with per_token = true return a list"),
        ([1.0, float("nan"), 2.0], "returned nan; return a finite float32 number"),
    ],
    ids=["short", "number", "text", "nan"],
)
def test_what_is_not_a_number_per_token_is_refused_with_the_row(given, said):
    with pytest.raises(RewardError, match=r"reward 'own' .*row 0") as caught:
        score_samples(FunctionReward(lambda sample: given), WORDS[:1], "own", per_token=True)
    assert said in str(caught.value)
