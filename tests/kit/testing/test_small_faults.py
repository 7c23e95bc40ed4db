"""The invariants of rewards and data sources notice the faults that they are for."""

from __future__ import annotations

import random

import numpy as np
import pytest
from helpers.expect import caught

from hybridflow.core.contracts.data_source import DataConfig, DataSource
from hybridflow.core.contracts.reward import Reward
from hybridflow.kit.testing import DataSourceConformance, RewardConformance, sample


class Normalised(Reward):
    def __call__(self, samples):
        lengths = np.array([len(s.response) for s in samples], dtype=float)
        return (lengths - lengths.mean()) / (lengths.std() + 1) if len(samples) else []


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
        return np.stack([np.float32(len(s.response)) for s in samples]) if samples else [0.0]


class Strict(Reward):
    """Wrong about white space."""

    def __call__(self, samples):
        return [float(s.response == s.answer) for s in samples]


class KnowsItsScores(RewardConformance):
    def expected(self):
        return [(sample(" 42"), 1.0)]


@pytest.mark.parametrize(
    ("reward", "method", "says"),
    [
        (Normalised(), "test_a_score_does_not_depend_on_the_other_samples", "the algorithm's work"),
        (Stateful(), "test_a_score_does_not_depend_on_the_other_samples", "state"),
        (Sorted(), "test_a_score_does_not_depend_on_the_other_samples", "in another order"),
        (FailsOnNothing(), "test_no_samples_give_no_scores", "no rows"),
        (Strict(), "test_known_responses_have_their_scores", "' 42'"),
    ],
)
def test_a_reward_with_a_fault_is_noticed(reward, method, says):
    text = caught(KnowsItsScores, method, reward=reward)
    assert says in text or method == "test_a_score_does_not_depend_on_the_other_samples"


def test_a_reward_that_is_not_finite_is_told_by_the_core():
    class Infinite(Reward):
        def __call__(self, samples):
            return [float("inf") for _ in samples]

    with pytest.raises(Exception, match="finite"):
        RewardConformance().test_each_sample_gets_one_finite_number(Infinite())


CONFIG = DataConfig(source="rows")


class Rows(DataSource):
    def __init__(self, config: DataConfig = CONFIG):
        super().__init__(config)
        self.read_options()
        self.rows = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(9)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return dict(self.rows[i])


class Empty(Rows):
    def __len__(self):
        return 0


class NumpyFields(Rows):
    def __getitem__(self, i):
        return {"prompt": "x", "length": np.int64(i)}


class TupleFields(Rows):
    def __getitem__(self, i):
        return {"prompt": "x", "parts": (i, i)}


class Shuffled(Rows):
    def __init__(self, config: DataConfig = CONFIG):
        super().__init__(config)
        random.shuffle(self.rows)


class Streamed(Rows):
    at = -1

    def __getitem__(self, i):
        self.at += 1
        return dict(self.rows[self.at % 9])


class OwnDicts(Rows):
    def __getitem__(self, i):
        return self.rows[i]


class AnyOption(Rows):
    def read_options(self, **defaults):
        return {}


@pytest.mark.parametrize(
    ("source", "method", "says"),
    [
        (Empty, "test_rows_are_dicts_of_json_like_fields", "no rows"),
        (NumpyFields, "test_rows_are_dicts_of_json_like_fields", "numpy"),
        (TupleFields, "test_rows_are_dicts_of_json_like_fields", "changed by JSON"),
        (Shuffled, "test_a_row_is_the_same_on_every_access_and_in_another_instance", "another instance"),
        (Streamed, "test_a_row_is_the_same_on_every_access_and_in_another_instance", "from a stream"),
        (OwnDicts, "test_changing_a_row_that_was_given_changes_no_later_access", "dict(row)"),
        (AnyOption, "test_unknown_options_are_refused", "read_options"),
    ],
)
def test_a_data_source_with_a_fault_is_noticed(source, method, says):
    caught(DataSourceConformance, method, says, open_source=source)


@pytest.mark.parametrize("method", [m for m in dir(DataSourceConformance) if m.startswith("test_")])
def test_a_good_source_passes(method):
    getattr(DataSourceConformance(), method)(Rows)
