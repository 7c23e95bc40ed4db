"""Every invariant of RewardConformance notices the fault that it is for."""

from __future__ import annotations

import asyncio
import itertools
from functools import partial

import numpy as np
import pytest
from helpers.expect import caught, each_fault, each_invariant

from hybridflow.core.contracts.reward import FunctionReward, Reward
from hybridflow.core.errors import HybridFlowError
from hybridflow.kit.testing.rewards import RewardConformance, sample


class Normalised(Reward):
    def __call__(self, samples):
        lengths = np.array([len(s.response) for s in samples], dtype=float)
        return (lengths - lengths.mean()) / (lengths.std() + 1) if samples else []


class Stateful(Reward):
    calls = 0

    def __call__(self, samples):
        self.calls += 1
        return [float(self.calls) for _ in samples]


class Sorted(Reward):
    def __call__(self, samples):
        return sorted(float(len(s.response)) for s in samples)


class FailsOnNothing(Reward):
    def __call__(self, samples):
        return [float(len(s.response)) for s in samples] or [0.0]


class Strict(Reward):
    """Wrong about white space."""

    def __call__(self, samples):
        return [float(s.response == s.answer) for s in samples]


class KnowsItsScores(RewardConformance):
    def expected(self):
        return [(sample(" 42"), 1.0)]


class Stripped(Reward):
    """A good one."""

    def __call__(self, samples):
        return [float(s.response.strip() == s.answer) for s in samples]


async def judge(sample):
    """A good one that waits, as a model that judges does."""
    await asyncio.sleep(0)
    return float(sample.response.strip() == sample.answer)


calls = itertools.count()


async def forgetful(sample):
    return float(next(calls))


FAULTS = {
    "test_a_score_does_not_depend_on_the_other_samples": [
        Normalised,
        Stateful,
        Sorted,
        partial(FunctionReward, forgetful),
    ],
    "test_no_samples_give_no_scores": [FailsOnNothing],
    "test_known_responses_have_their_scores": [Strict],
}


@each_fault(RewardConformance, FAULTS, {"test_each_sample_gets_one_finite_number"})
def test_the_fault_is_noticed(fault, method):
    caught(KnowsItsScores, method, reward=fault())


@pytest.mark.parametrize("score", [float("inf"), float("nan"), "1"])
def test_a_score_that_is_no_finite_number_is_told_by_the_core(score):
    class Odd(Reward):
        def __call__(self, samples):
            return [score for _ in samples]

    with pytest.raises(HybridFlowError, match=r"conformance.*return a.* number"):
        RewardConformance().test_each_sample_gets_one_finite_number(Odd())


@each_invariant(RewardConformance)
def test_a_good_reward_passes(method):
    getattr(KnowsItsScores(), method)(Stripped())


@each_invariant(RewardConformance)
def test_f25_a_function_that_waits_passes(method):
    getattr(KnowsItsScores(), method)(FunctionReward(judge))


def test_known_scores_are_skipped_where_none_are_given():
    with pytest.raises(pytest.skip.Exception, match="expected"):
        RewardConformance().test_known_responses_have_their_scores(Stripped())


def test_a_sample_has_its_text_as_ids_and_the_answer_in_meta():
    made = sample("4\u00e9", answer="7", finish_reason="length")
    assert made.response_ids.tolist() == [0x34, 0xC3, 0xA9]
    assert made.response_ids.dtype == np.int64
    assert (made.prompt, made.response, made.answer) == ("6*7=", "4\u00e9", "7")
    assert made.finish_reason == "length"
