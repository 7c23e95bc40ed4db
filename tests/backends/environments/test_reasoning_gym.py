"""Tasks of reasoning-gym: rows, scores as its own, tries, and what is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
import reasoning_gym
from helpers.sources import config, read

from hybridflow.backends.environments.reasoning_gym import TaskReward, TaskSource, Tries
from hybridflow.core.contracts.environment import Answer, Start
from hybridflow.core.contracts.reward import RewardSample
from hybridflow.core.errors import ConfigError, RewardError
from hybridflow.kit.testing import (
    DataSourceConformance,
    EnvironmentConformance,
    RewardConformance,
)

SUMS = {
    "dataset": "chain_sum",
    "settings": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "rows": 300,
    "held_out": 20,
}
WORDS = {"dataset": "spell_backward", "settings": {"max_word_len": 4}, "rows": 50, "held_out": 5}
MIXED = {
    "dataset": "composite",
    "settings": {
        "datasets": [
            {"name": "chain_sum", "weight": 1.0, "config": {"max_digits": 2}},
            {"name": "countdown", "weight": 1.0, "config": {}},
        ]
    },
    "rows": 30,
    "held_out": 5,
}


def rows(options, **more):
    return read(TaskSource(config("reasoning_gym", **{**options, **more})))


def sample(row, response):
    return RewardSample(row["prompt"], response, np.zeros(1, np.int64), row)


class TestSource(DataSourceConformance):
    @pytest.fixture(params=[SUMS, WORDS, MIXED], ids=["sums", "words", "mixed"])
    def open_source(self, request):
        return lambda: TaskSource(config("reasoning_gym", **request.param))


class TestReward(RewardConformance):
    @pytest.fixture
    def reward(self):
        return TaskReward()

    def samples(self):
        row = rows(WORDS)[0]
        return [
            sample(row, response) for response in ("", "abc", "9" * 500, "<answer>", row["answer"])
        ]


class TestTries(EnvironmentConformance):
    @pytest.fixture
    def make(self):
        return lambda: Tries(tries=4)

    @staticmethod
    def start(prompt="", seed=0, **meta):
        row = rows(SUMS)[seed]
        return Start(row["prompt"], {**row, **meta}, seed)


def test_questions_are_reasoning_gyms_and_each_is_one_row():
    dataset = reasoning_gym.create_dataset("chain_sum", seed=0, size=300, **SUMS["settings"])
    questions = list(dict.fromkeys(dataset[i]["question"] for i in range(300)))
    assert len(questions) < 200  # of 200 sums and differences
    held_out, train = rows(SUMS, split="held-out"), rows(SUMS)
    assert [row["prompt"] for row in held_out + train] == questions and len(held_out) == 20
    answers = {dataset[i]["question"]: dataset[i]["answer"] for i in range(300)}
    assert all(row["answer"] == answers[row["prompt"]] for row in train)
    assert rows(SUMS, seed=1) != train


def test_rows_are_chats_too():
    row = rows(SUMS, system="Answer with a number.")[0]
    assert row["messages"] == [
        {"role": "system", "content": "Answer with a number."},
        {"role": "user", "content": row["prompt"]},
    ]
    assert [message["role"] for message in rows(SUMS)[0]["messages"]] == ["user"]


@pytest.mark.parametrize("options", [SUMS, WORDS, MIXED], ids=["sums", "words", "mixed"])
def test_scores_are_those_of_the_dataset(options):
    """Rows come back from JSON, as from another process."""
    found = json.loads(json.dumps(rows(options)))[:10]
    task = found[0]["reasoning_gym"]
    given = dict(task["settings"])
    if "datasets" in given:
        from reasoning_gym.composite import DatasetSpec

        given["datasets"] = [DatasetSpec(**part) for part in given["datasets"]]
    dataset = reasoning_gym.create_dataset(task["dataset"], seed=0, size=task["rows"], **given)
    scores = set()
    for row in found:
        entry = dataset[row["reasoning_gym"]["index"]]
        for answer in (row["answer"], row["answer"] + "0", row["answer"][:1], "no"):
            expected = dataset.score_answer(answer, entry)
            assert TaskReward()([sample(row, f" {answer}\n")]) == [expected]
            scores.add(expected)
    assert 1.0 in scores and len(scores) > 1


def test_with_a_tag_the_answer_is_what_stands_in_the_last_one():
    row, reward = rows(WORDS)[0], TaskReward(tag="answer")
    said = f"<answer>abc</answer> no: <answer> {row['answer']} </answer>."
    assert reward([sample(row, said), sample(row, row["answer"])]) == [1.0, 0.0]
    assert reward.answer(sample(row, said)) == row["answer"]
    assert reward.answer(sample(row, row["answer"])) is None


def test_a_wrong_answer_may_be_given_again():
    row = rows(WORDS)[0]
    environment, turn = Tries(tries=2, again="again:"), EnvironmentConformance.turn
    assert environment.reset(Start(row["prompt"], row, 0)) == Answer()
    assert environment.step(turn("x")) == Answer("again:", state="try 1")
    assert environment.step(turn(row["answer"], 1)) == Answer(reward=1.0, done=True)
    part = row["answer"][0]  # one letter of 3 or 4 is right
    last = Tries(tries=1)
    last.reset(Start(row["prompt"], row, 0))
    assert last.step(turn(part)) == Answer(reward=pytest.approx(1 / len(row["answer"])), done=True)


@pytest.mark.parametrize(
    "options, why",
    [
        ({**SUMS, "dataset": "chain_sums"}, "no dataset 'chain_sums'; did you mean 'chain_sum'"),
        ({**SUMS, "settings": {"terms": 2}}, r"data\.options\.settings .*unexpected keyword"),
        ({**SUMS, "settings": {"min_terms": 0}}, r"data\.options\.settings .* do not fit"),
        ({**SUMS, "split": "test"}, 'split must be "train" or "held-out"'),
        ({**SUMS, "held_out": 250}, r"held_out 250 of \d+ different questions \(300 were drawn\)"),
    ],
    ids=["dataset", "settings", "values", "split", "held_out"],
)
def test_options_that_do_not_fit_are_refused(options, why):
    with pytest.raises(ConfigError, match=why):
        rows(options)


def test_no_try_is_refused():
    with pytest.raises(ConfigError, match="option tries is 0"):
        Tries(tries=0)


def test_a_row_of_another_source_is_refused():
    with pytest.raises(RewardError, match='of the data source "reasoning_gym"'):
        TaskReward()([sample({"prompt": "1+1=", "answer": "2"}, "2")])
