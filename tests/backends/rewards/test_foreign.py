"""Functions of TRL and verl as rewards: what they are given is what those libraries give them."""

from __future__ import annotations

import importlib
import sys

import numpy as np
import pytest

from hybridflow.backends.rewards.foreign import TRLReward, VerlReward
from hybridflow.core.contracts.reward import RewardSample
from hybridflow.core.errors import ConfigError, RewardError
from hybridflow.core.plugins.resolve import reward_from

SOURCE = '''
SEEN = []


def accuracy(completions, solution, **kwargs):
    """As in TRL's docs: the columns of the data set come as lists."""
    SEEN.append({"completions": completions, "solution": solution, **kwargs})
    kwargs["log_metric"]("accuracy", 1.0)
    return [
        1.0 if answer in text else None for text, answer in zip(completions, solution, strict=True)
    ]


async def waits(prompts, completions, completion_ids, weight=1.0, **kwargs):
    return [weight * len(ids) for ids in completion_ids]


def content(completions, **kwargs):
    return [float(len(completion[0]["content"])) for completion in completions]


def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    """As in verl's docs."""
    SEEN.append(
        {"data_source": data_source, "ground_truth": ground_truth, "extra_info": extra_info}
    )
    return {"score": float(solution_str == ground_truth) + bonus, "acc": 1.0}


async def plain_score(data_source, solution_str, ground_truth, extra_info=None):
    return solution_str == ground_truth


def no_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"acc": 1.0}


def ours(sample):
    return 1.0
'''
HERE = "foreign_rewards:"


@pytest.fixture(autouse=True)
def seen(tmp_path, monkeypatch):
    """What the functions were given; they are a user's module."""
    (tmp_path / "foreign_rewards.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("foreign_rewards", None)
    yield importlib.import_module("foreign_rewards").SEEN
    sys.modules.pop("foreign_rewards", None)


def sample(response="it is 7", **meta) -> RewardSample:
    return RewardSample("2+5=", response, np.array([4, 5, 6]), meta)


def test_a_function_of_trl_gets_lists_and_none_is_nothing(seen):
    rows = [
        sample(solution="7", level=1, prompt="2+5="),
        sample("it is 8", solution="7", level=2, prompt="2+5="),
    ]
    assert TRLReward(HERE + "accuracy")(rows) == [1.0, 0.0]
    [got] = seen
    assert got["prompts"] == ["2+5=", "2+5="] and got["completion_ids"] == [[4, 5, 6]] * 2
    assert got["level"] == [1, 2] and "prompt" not in got and got["trainer_state"] is None


def test_chats_stay_chats():
    chat = [{"role": "user", "content": "2+5?"}]
    assert TRLReward(HERE + "content")([sample("seven", prompt=chat)]) == [5.0]
    assert TRLReward(HERE + "accuracy")(
        [sample([{"content": "7"}], solution="7", prompt="2+5=")]
    ) == [0.0]


def test_one_that_waits_is_waited_for_and_has_its_options():
    reward = reward_from("trl", {"function": HERE + "waits", "weight": 2.0})
    assert reward([sample(), sample()]) == [6.0, 6.0]


def test_a_function_of_verl_gets_one_response(seen):
    row = sample(
        "7",
        data_source="sums",
        reward_model={"ground_truth": "7", "style": "rule"},
        extra_info={"index": 3},
    )
    assert VerlReward(HERE + "compute_score")([row]) == [1.0]
    assert seen == [{"data_source": "sums", "ground_truth": "7", "extra_info": {"index": 3}}]
    reward = reward_from("verl", {"function": HERE + "compute_score", "bonus": 0.5})
    assert reward([sample("8", answer="7")]) == [0.5]
    assert seen[1] == {"data_source": None, "ground_truth": "7", "extra_info": {}}
    assert VerlReward(HERE + "plain_score")([sample("7", answer="7")]) == [1.0]


def test_what_does_not_fit_is_said():
    with pytest.raises(ConfigError, match="no function with a parameter 'completions'"):
        reward_from("trl", {"function": HERE + "ours"})
    with pytest.raises(ConfigError, match="no function with a parameter 'solution_str'"):
        reward_from("verl", {"function": HERE + "ours"})
    with pytest.raises(RewardError, match="a dict without `score`: \\['acc'\\]"):
        VerlReward(HERE + "no_score")([sample("7", answer="7")])
    with pytest.raises(ConfigError, match='name it as it is by function = "verl", options'):
        reward_from(HERE + "compute_score")
