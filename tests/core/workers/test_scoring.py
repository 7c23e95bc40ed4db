"""Rewards: functions and classes by name or path, and errors that name the row."""

from __future__ import annotations

import math
import sys
import types

import numpy as np
import pytest
import torch

from hybridflow.algorithms.grpo import GRPO, GRPOConfig
from hybridflow.core.contracts.reward import FunctionReward, Reward, RewardSample
from hybridflow.core.errors import ConfigError, PluginError, RewardError
from hybridflow.core.plugins.resolve import make_reward, reward_from
from hybridflow.core.workers.scoring import score_samples
from hybridflow.kit.testing import TinyRun
from hybridflow.kit.testing.runs import MODEL


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


@pytest.fixture
def module(monkeypatch):
    made = types.ModuleType("made_for_test")
    made.length, made.Batched, made.number = length, Batched, 3
    monkeypatch.setitem(sys.modules, "made_for_test", made)


def test_a_function_of_one_sample_is_a_reward(module):
    reward = reward_from("made_for_test:length")
    scores = score_samples(reward, SAMPLES, "length")
    assert scores.dtype == np.float32
    assert scores.tolist() == [1, 2, 3]
    assert score_samples(reward_from("made_for_test:length", {"scale": 0.5}), SAMPLES, "l").tolist() == [0.5, 1, 1.5]


def test_a_reward_class_gets_its_options_and_all_samples_at_once(module):
    calls = []
    reward = reward_from("made_for_test:Batched", {"give": lambda s: calls.append(len(s)) or range(len(s))})
    assert score_samples(reward, SAMPLES, "batched").tolist() == [0, 1, 2]
    assert calls == [3]


def test_the_built_in_rewards_are_found_by_name():
    assert score_samples(reward_from("exact_match"), [sample("2", answer="2")], "exact_match").tolist() == [1]


def test_a_name_that_is_none_options_that_do_not_fit_and_objects_that_are_no_reward_are_refused(module):
    with pytest.raises(PluginError, match="exact_match"):
        reward_from("exact_mach")
    with pytest.raises(
        ConfigError, match=r"'scal': 2.* do not fit reward 'made_for_test:length'\(sample, scale=1\.0\)"
    ):
        reward_from("made_for_test:length", {"scal": 2})
    with pytest.raises(ConfigError, match=r"do not fit reward 'made_for_test:Batched'.*give"):
        reward_from("made_for_test:Batched")
    with pytest.raises(ConfigError, match="must be a function of one sample, or a class derived from"):
        reward_from("made_for_test:number")
    with pytest.raises(ConfigError, match="class derived from"):
        make_reward(dict, "dict", {})


def test_no_samples_give_no_scores():
    assert score_samples(FunctionReward(length), [], "length").shape == (0,)


@pytest.mark.parametrize("make", [FunctionReward, lambda fn: Batched(lambda samples: [fn(s) for s in samples])])
def test_a_reward_that_raises_is_named_with_row_prompt_and_response(make):
    def fails(sample):
        return 1 / (len(sample.response) - 2)

    samples = [sample("a"), sample("bb", prompt="p" * 500), sample("ccc")]
    with pytest.raises(
        RewardError, match=r"reward 'mine' raised ZeroDivisionError.*row 1: prompt 'ppp.*'bb'"
    ) as caught:
        score_samples(make(fails), samples, "mine")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert len(str(caught.value)) < 300


def test_a_class_that_raises_only_for_rows_together_is_named_too():
    def together(samples):
        if len(samples) > 1:
            raise MemoryError("too many")
        return [0.0]

    with pytest.raises(RewardError, match="raised MemoryError for 3 rows together, though for none of them alone"):
        score_samples(Batched(together), SAMPLES, "mine")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e300, 10**400, "1.0", None, [1.0], {}])
def test_what_is_no_finite_number_is_named(value):
    with pytest.raises(RewardError, match=r"reward 'mine' returned .*row 1: prompt '1\+1=', response 'bb'"):
        score_samples(FunctionReward(lambda s: value if s.response == "bb" else 0.0), SAMPLES, "mine")


def test_numbers_of_every_kind_are_taken():

    values = [True, np.float64(0.5), torch.tensor(2.0)]
    assert score_samples(Batched(lambda s: values), SAMPLES, "mine").tolist() == [1, 0.5, 2]
    assert score_samples(Batched(lambda s: torch.arange(3)), SAMPLES, "mine").tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "given, words", [([1.0, 2.0], "2 values for 3 rows"), (1.0, "a list with one number"), (None, "list")]
)
def test_a_batch_of_the_wrong_size_is_refused(given, words):
    with pytest.raises(RewardError, match=words):
        score_samples(Batched(lambda s: given), SAMPLES, "mine")


def test_a_reward_that_is_a_model_reports_its_mean():
    tables = {"reward": {"model": {"config": MODEL}}, "data": {"limit": 0}}
    with TinyRun(GRPO(GRPOConfig(group_size=2, prompts_per_step=4)), tables) as run:
        batch = run.ctx.actor.generate(run.ctx.prompts(4))
        scores = torch.as_tensor(run.ctx.reward.score(batch)["scores"].values)
        assert len(set(scores.tolist())) > 1
        assert run.ctx.finish()["reward/scores"] == pytest.approx(scores.double().mean().item())
