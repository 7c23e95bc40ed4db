"""What a calibration runs: which calls, how often, and that the best of the rounds counts."""

from __future__ import annotations

import itertools

import attrs
import pytest
import torch

from hybridflow.core.contracts.role import Role
from hybridflow.core.contracts.rollout import SamplingParams
from hybridflow.planner.calibration import probes
from hybridflow.planner.calibration.probes import VERBS, Likelihood, Probes, ProbesConfig, made_up
from hybridflow.planner.trace import trace_step
from hybridflow.planner.workload import Task

LENGTHS = ((2, 4, 8), (6, 3, 5))


def test_every_verb_is_called_once_to_warm_up_and_once_a_round():
    tasks = trace_step(Probes(ProbesConfig(roles=("one", "two"), lengths=LENGTHS, rounds=3)))
    expected = {
        Task(role, verb, sequences, 1 + 3)
        for role, verb, (sequences, _, _) in itertools.product(
            ("one", "two"), ("infer", "train", "generate"), LENGTHS
        )
    }
    assert set(tasks) == expected and len(tasks) == len(expected)


@attrs.define
class Told:
    """In place of a role and of the context: each verb takes the next of its seconds."""

    seconds: dict[str, list[float]]
    now: float = 0.0
    role: Role = attrs.field(factory=lambda: Role("one"))
    sampling: SamplingParams = attrs.field(factory=lambda: SamplingParams(max_tokens=99))
    asked: list[tuple] = attrs.field(factory=list)

    @property
    def one(self) -> Told:
        return self

    def take(self, verb: str) -> Told:
        self.now += self.seconds[verb].pop(0)
        return self

    def logprobs(self, batch):
        return {self.role.column: self.take("infer")}

    def update(self, pair):
        return self.take("train")

    def sync(self):
        return self.take("sync")

    def generate(self, prompts, sampling):
        self.asked.append(
            (prompts.rows, set(prompts.names), sampling.max_tokens, sampling.ignore_stop)
        )
        return {"response_ids": self.take("generate")}

    def result(self) -> None:
        """Its time is taken already."""


def probed(monkeypatch, told: Told, **settings) -> dict[str, float]:
    """The seconds of each verb's only sample."""
    monkeypatch.setattr(probes.time, "perf_counter", lambda: told.now)
    algorithm = Probes(ProbesConfig(roles=("one",), lengths=LENGTHS[:1], **settings))
    algorithm.step(told)
    assert [(s.role, s.sequences, s.prompt, s.response) for s in algorithm.samples] == [
        ("one", 2, 4, 8)
    ] * len(VERBS)
    return {s.verb: s.seconds for s in algorithm.samples}


def test_the_best_of_the_rounds_counts_and_the_first_call_does_not(monkeypatch):
    seconds = {
        "infer": [0.1, 3.0, 2.0, 4.0],
        "train": [0.1, 5.0, 6.0, 7.0],
        "sync": [0.1, 0.4, 0.3, 0.2],
        "generate": [0.1, 9.0, 9.0, 8.0],
    }
    told = Told({verb: list(taken) for verb, taken in seconds.items()})
    assert probed(monkeypatch, told, rounds=3) == pytest.approx(
        {v: min(taken[1:]) for v, taken in seconds.items()}
    )
    assert (
        told.asked == [(2, {"prompt_ids", "group", "meta"}, 8, True)] * 4
    )  # as long as asked for, whatever comes


def test_no_round_is_begun_after_the_time_and_the_first_is_made(monkeypatch):
    left = {"infer": [1.0] * 9, "train": [1.0] * 9, "sync": [1.0] * 9, "generate": [1.0] * 9}
    found = probed(monkeypatch, Told(left), rounds=8, seconds=7.5)
    assert found == pytest.approx(dict.fromkeys(VERBS, 1.0))
    assert {verb: 9 - len(seconds) for verb, seconds in left.items()} == dict.fromkeys(VERBS, 1 + 2)


def test_a_batch_is_made_up_with_rows_of_the_lengths_asked_for():
    batch = made_up(3, 5, 2)
    assert batch.rows == 3
    assert [len(row) for row in batch["prompt_ids"]] == [5] * 3
    assert [len(row) for row in batch["response_ids"]] == [2] * 3
    assert batch["loss_mask"].values.tolist() == [1] * 6
    again = made_up(3, 5, 2)
    assert torch.equal(again["prompt_ids"].values, batch["prompt_ids"].values)


def test_the_loss_is_the_likelihood_of_the_responses():
    logprobs = torch.tensor([[-1.0, -2.0]])
    term = Likelihood()({}, {"logprobs": logprobs})
    assert term.value.tolist() == [[1.0, 2.0]] and term.how == "token-mean"
