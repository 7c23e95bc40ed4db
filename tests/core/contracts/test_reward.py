"""What a reward sees of a response, and functions as rewards."""

from __future__ import annotations

import numpy as np
import pytest

from hybridflow.core.contracts.reward import FunctionReward, Reward, RewardFailureRule, RewardSample
from hybridflow.core.errors import RewardError


def sample(response="2", **meta):
    return RewardSample("1+1=", response, np.array([5, 2]), meta)


def test_the_expected_answer_is_a_text():
    assert sample(answer="2").answer == "2"
    assert sample(answer=2).answer == "2"
    assert sample(answer=0).answer == "0"


def test_a_row_without_an_answer_says_what_it_has_and_what_to_set():
    with pytest.raises(RewardError, match=r"its fields are question, level\); set data\.answer"):
        _ = sample(question="1+1", level=3).answer
    with pytest.raises(RewardError, match="its fields are none"):
        _ = sample().answer
    with pytest.raises(RewardError, match="its fields are answer"):
        _ = sample(answer=None).answer


def test_a_function_scores_one_sample_after_the_other_with_its_options():
    def length(sample, each=1.0, extra=0.0):
        return each * len(sample.response) + extra

    samples = [sample("ab"), sample(""), sample("a")]
    assert FunctionReward(length)(samples) == [2.0, 0.0, 1.0]
    assert FunctionReward(length, each=2.0, extra=0.5)(samples) == [4.5, 0.5, 2.5]
    assert FunctionReward(length)([]) == []


@pytest.mark.parametrize("setting", [{"retries": -1}, {"timeout_s": 0.0}, {"at_once": 0}], ids=str)
def test_a_rule_for_failures_that_cannot_be_is_refused(setting):
    [name] = setting
    with pytest.raises(ValueError, match=f"^{name}: must be "):
        RewardFailureRule(**setting)


def test_a_reward_may_say_what_an_answer_is():
    class Plain(Reward):
        def __call__(self, samples):
            return [0.0 for _ in samples]

    class Says(Plain):
        def answer(self, sample):
            return sample.response[-1:]

    assert not Plain().answers and Says().answers
    assert Says().answer(sample("a7")) == "7"
    with pytest.raises(NotImplementedError, match="Plain does not say what an answer is"):
        Plain().answer(sample())


def test_a_function_s_answer_is_an_attribute():
    def score(sample, scale=1.0):
        return scale

    assert not FunctionReward(score).answers
    score.answer = lambda sample: sample.response.strip() or None
    reward = FunctionReward(score, scale=2.0)
    assert reward.answers and reward([sample()]) == [2.0]
    assert reward.answer(sample(" 7 ")) == "7" and reward.answer(sample(" ")) is None
