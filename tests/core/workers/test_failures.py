"""Rewards that fail: tried again, given up at a deadline, scored by rule, and always told."""

from __future__ import annotations

import asyncio
import logging
import threading
import time

import numpy as np
import pytest

from hybridflow.algorithms.grpo import GRPO, GRPOConfig
from hybridflow.core.contracts.reward import FunctionReward, Reward, RewardFailureRule, RewardSample
from hybridflow.core.errors import ConfigError, RewardError
from hybridflow.core.workers.failures import score_by_rule
from hybridflow.kit.testing import TinyRun


def samples(count: int) -> list[RewardSample]:
    return [RewardSample(f"p{i}", str(i), np.array([i]), {}) for i in range(count)]


class Flaky:
    """Fails the first `bad` times that it sees a sample."""

    def __init__(self, bad: int, how=None):
        self.bad, self.how, self.seen = bad, how or ValueError("no answer"), {}

    def __call__(self, sample):
        self.seen[sample.response] = self.seen.get(sample.response, 0) + 1
        if self.seen[sample.response] <= self.bad and int(sample.response) % 2:
            if isinstance(self.how, Exception):
                raise self.how
            return self.how
        return float(sample.response)


@pytest.mark.parametrize(
    "how", [ValueError("no answer"), float("nan"), "text"], ids=["raises", "nan", "text"]
)
def test_a_sample_that_fails_is_tried_again_and_the_log_says_so(how, caplog):
    function = Flaky(2, how)
    with caplog.at_level(logging.WARNING):
        found, failed = score_by_rule(
            FunctionReward(function), samples(4), "flaky", RewardFailureRule(retries=2)
        )
    assert (
        found.tolist() == [0.0, 1.0, 2.0, 3.0] and found.dtype == np.float32 and failed.sum() == 0
    )
    assert function.seen == {"0": 1, "1": 3, "2": 1, "3": 3}
    assert (
        "reward 'flaky'" in caplog.text
        and "row 3" in caplog.text
        and "tried again (1 left)" in caplog.text
    )


def test_when_all_tries_have_failed_the_run_ends_or_the_rule_scores(caplog):
    with pytest.raises(RewardError, match=r"'flaky' raised ValueError.* \[row 1"):
        score_by_rule(FunctionReward(Flaky(9)), samples(4), "flaky", RewardFailureRule(retries=1))
    with caplog.at_level(logging.WARNING):
        found, failed = score_by_rule(
            FunctionReward(Flaky(9)), samples(4), "flaky", RewardFailureRule(score=-1.0)
        )
    assert found.tolist() == [0.0, -1.0, 2.0, -1.0] and failed.sum() == 2
    assert "it gets -1 by rule" in caplog.text and "row 3" in caplog.text


def test_a_function_that_takes_too_long_has_failed():
    hold = threading.Event()

    def slow(sample):
        if sample.response == "1":
            hold.wait(60)
        return 1.0

    started = time.monotonic()
    found, failed = score_by_rule(
        FunctionReward(slow), samples(3), "slow", RewardFailureRule(timeout_s=0.3, score=0.0)
    )
    hold.set()
    assert (
        found.tolist() == [1.0, 0.0, 1.0] and failed.sum() == 1 and time.monotonic() - started < 30
    )
    with pytest.raises(RewardError, match=r"took longer than timeout_s = 0.05 s \[row 0"):
        score_by_rule(
            FunctionReward(lambda sample: time.sleep(5)),
            samples(1),
            "slow",
            RewardFailureRule(timeout_s=0.05),
        )


def test_async_functions_wait_together_and_at_most_so_many_at_once():
    running, most = 0, 0

    async def judge(sample, bonus=0.0):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.02)
        running -= 1
        return float(sample.response) + bonus

    found, _ = score_by_rule(
        FunctionReward(judge, bonus=0.5), samples(6), "judge", RewardFailureRule(at_once=3)
    )
    assert found.tolist() == [0.5, 1.5, 2.5, 3.5, 4.5, 5.5] and most == 3

    async def never(sample):
        await asyncio.sleep(60)

    found, failed = score_by_rule(
        FunctionReward(never), samples(2), "never", RewardFailureRule(timeout_s=0.05, score=0.0)
    )
    assert failed.sum() == 2 and found.tolist() == [0.0, 0.0]


def test_a_reward_may_be_called_where_an_event_loop_runs():
    async def inside():
        return score_by_rule(
            FunctionReward(Flaky(1)), samples(2), "flaky", RewardFailureRule(retries=1)
        )

    assert asyncio.run(inside())[0].tolist() == [0.0, 1.0]


def test_a_functions_own_timeout_is_an_error_like_others():
    def judge(sample):
        raise TimeoutError("the judge is away")

    for rule in (RewardFailureRule(score=0.0), RewardFailureRule(score=0.0, timeout_s=5.0)):
        found, failed = score_by_rule(FunctionReward(judge), samples(2), "judge", rule)
        assert found.tolist() == [0.0, 0.0] and failed.sum() == 2
    with pytest.raises(RewardError, match="raised TimeoutError: the judge is away"):
        score_by_rule(FunctionReward(judge), samples(1), "judge", RewardFailureRule(retries=1))


def test_a_function_may_run_a_loop_of_its_own_and_is_called_in_the_callers_thread():
    seen = set()

    async def ask():
        return 1.0

    def judge(sample):
        seen.add(threading.get_ident())
        return asyncio.run(ask())

    found, failed = score_by_rule(
        FunctionReward(judge), samples(2), "judge", RewardFailureRule(retries=1, score=0.0)
    )
    assert found.tolist() == [1.0, 1.0] and failed.sum() == 0 and seen == {threading.get_ident()}


def test_of_a_reward_per_token_the_score_by_rule_is_at_the_last_token_that_the_model_wrote():
    def fails(sample):
        raise ValueError("no judge")

    answered = RewardSample("p", "", np.array([7, 8, 9]), {}, written=np.array([True, True, False]))
    empty = RewardSample("p", "", np.array([], np.int64), {})
    every = [RewardSample("p", "", np.array([4, 5, 6]), {}), answered, empty]
    found, failed = score_by_rule(
        FunctionReward(fails), every, "own", RewardFailureRule(score=-1.0), per_token=True
    )
    assert [f.tolist() for f in found] == [[0, 0, -1], [0, -1, 0], []] and failed.sum() == 3


class Batches(Reward):
    """Scores a batch, unless sample 1 is in it with others."""

    def __call__(self, samples):
        if len(samples) > 1 and any(s.response == "1" for s in samples):
            raise RuntimeError("too much at once")
        return [float(s.response) for s in samples]


def test_a_class_gets_its_batch_first_and_then_the_samples_alone(caplog):
    with caplog.at_level(logging.WARNING):
        found, failed = score_by_rule(
            Batches(), samples(3), "batches", RewardFailureRule(score=0.0)
        )
    assert (
        found.tolist() == [0.0, 1.0, 2.0]
        and failed.sum() == 0
        and "scored one by one" in caplog.text
    )
    with pytest.raises(RewardError, match="too much at once"):
        score_by_rule(Batches(), samples(3), "batches", RewardFailureRule())


def sometimes(sample) -> float:
    if sample.response_ids[0] % 2:
        raise ValueError("odd")
    return float((sample.response_ids % 2 == 0).mean())


HERE = "tests.core.workers.test_failures"


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        ({"function": f"{HERE}:sometimes", "on_failure": {"retries": -1}}, r"on_failure\.retries"),
        ({"function": f"{HERE}:sometimes", "on_failure": {"tries": 1}}, r"on_failure\.tries"),
        (
            {
                "parts": [{"name": "a", "function": f"{HERE}:sometimes"}],
                "on_failure": {"score": 0.0},
            },
            r"reward\.on_failure: ",
        ),
    ],
)
def test_wrong_rules_are_told(reward, said):
    with pytest.raises(ConfigError, match=said):
        TinyRun(GRPO(GRPOConfig(prompts_per_step=4, group_size=4)), {"reward": reward})
