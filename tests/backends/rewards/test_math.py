"""The reward "math": which final answers count as equal, and that no response can stop a run."""

from __future__ import annotations

import json
import pickle
import threading
import time
from decimal import Decimal

import numpy as np
import pytest
from helpers.paths import GSM8K

pytest.importorskip("math_verify")

from hybridflow.backends.rewards.math import MathReward, number
from hybridflow.core.contracts.reward import RewardSample
from hybridflow.core.errors import ConfigError, RewardError
from hybridflow.core.workers.scoring import score_samples


def test_numbers_are_read_without_signs_of_money_and_thousands():
    texts = ("$1,234", " -5. ", "\\$18.50", ".5", "+3", "0018")
    values = (1234, -5, Decimal("18.5"), Decimal("0.5"), 3, 18)
    assert tuple(map(number, texts)) == values
    for text in ("12,34", "1/2", "18 dollars", "", "x", "1e5"):
        assert number(text) is None, text


@pytest.fixture(scope="module")
def reward():
    return MathReward(timeout_s=60.0)  # the machine may be busy


def samples(*pairs):
    return [
        RewardSample("p", response, np.zeros(1, np.int64), {"answer": answer})
        for answer, response in pairs
    ]


def score(reward, answer, response):
    return float(score_samples(reward, samples((answer, response)), "math")[0])


@pytest.mark.parametrize(
    "answer, response",
    [
        ("18", "She makes 9 * 2 = <<9*2=18>>18 dollars.\n#### 18"),
        ("She sold <<2*9=18>>18.\n#### 18", "#### 18"),
        ("18", "#### $18.00"),
        ("18", "#### 18 dollars"),
        ("1,234", "so 1234 in total\n#### 1234"),
        ("1234", "\\boxed{1,234}"),
        ("-5", "\\boxed{-5}"),
        ("18", "The answer is 18."),
        ("18", "#### 3\nNo, wait.\n#### 18\n\nQuestion: 5 + 5?"),
        ("\\frac{1}{2}", "\\boxed{0.5}"),
        ("1/2", "Hence $x = \\frac{2}{4}$."),
        ("$x^2+1$", "\\boxed{1 + x^2}"),
        ("(1,2)", "\\boxed{(1, 2)}"),
        ("70", "#### 70%"),
    ],
)
def test_equal_answers_count_however_they_are_written(reward, answer, response):
    assert score(reward, answer, response) == 1


@pytest.mark.parametrize(
    "answer, response",
    [
        ("18", "#### 19"),
        ("18", "18\n#### 19"),
        ("18", "\\boxed{18} or rather \\boxed{81}"),
        ("18", "I do not know."),
        ("18", ""),
        ("18", "####"),
        ("\\frac{1}{2}", "\\boxed{\\frac{1}{3}}"),
        ("x+1", "\\boxed{x-1}"),
    ],
)
def test_other_answers_do_not_count(reward, answer, response):
    assert score(reward, answer, response) == 0


def test_a_response_that_never_ends_to_compute_counts_as_wrong_and_the_next_row_is_scored():
    reward = MathReward(timeout_s=3.0)
    score(reward, "x", "\\boxed{y}")  # the process is up
    start = time.monotonic()
    bad = ("5", "\\boxed{9^{9^{9^9}}}")
    assert score_samples(
        reward, samples(bad, ("\\frac{10}{2}", "\\boxed{5}")), "math"
    ).tolist() == [0, 1]
    assert time.monotonic() - start < 60


def test_it_works_off_the_main_thread_and_from_several(reward):
    found = {}

    def run(i):
        found[i] = score(reward, "x+1", f"\\boxed{{x+{i}}}")

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {0: 0, 1: 1, 2: 0, 3: 0}


def test_a_reward_travels_to_another_process_and_its_own_process_ends_with_it():
    reward = MathReward(timeout_s=60.0)
    assert score(reward, "x", "\\boxed{x}") == 1
    process = reward._verifier._process
    assert pickle.loads(pickle.dumps(reward)).timeout_s == 60.0
    del reward
    assert process.poll() is not None


def test_rows_and_settings_that_cannot_be_scored_say_so(reward):
    with pytest.raises(RewardError, match=r"row has no answer.*data\.answer.*row 0"):
        score_samples(reward, [RewardSample("p", "1", np.zeros(1, np.int64), {})], "math")
    with pytest.raises(RewardError, match=r"is empty; set data.answer"):
        score(reward, " ", "1")
    with pytest.raises(ConfigError, match="timeout_s"):
        MathReward(timeout_s=0)


@pytest.mark.skipif(not GSM8K.is_dir(), reason="GSM8K is not on this machine")
def test_it_agrees_with_the_labels_of_gsm8ks_model_solutions(reward):
    rows = [
        json.loads(line)
        for line in (GSM8K / "example_model_solutions.jsonl").open(encoding="utf-8")
    ][:200]
    models = [name for name, value in rows[0].items() if isinstance(value, dict)]
    pairs = [
        (row["ground_truth"].replace("\nA: ", "\n#### "), row[m]["solution"])
        for row in rows
        for m in models
    ]
    labels = [float(row[m]["is_correct"]) for row in rows for m in models]
    assert score_samples(reward, samples(*pairs), "math").tolist() == labels


@pytest.mark.parametrize(
    "response, answer",
    [
        ("so it is\n#### 1,234", "1234"),
        ("#### 18.50", "18.5"),
        (r"thus \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{3} no, \boxed{ $1,000 }", "1000"),
        (r"\boxed{100}", "100"),
        (r"\boxed{1", None),
        ("it is 18", None),
        (" 18. ", "18"),
        ("####  ", None),
    ],
)
def test_the_answer_is_what_the_response_marks(response, answer):
    sample = RewardSample("", response, np.zeros(1, np.int64), {"answer": "1"})
    assert MathReward().answer(sample) == answer
