"""The episodes of a batch: in rounds and each by itself, on one rank and on several."""

from __future__ import annotations

import threading

import attrs
import pytest
import torch
from helpers import episode_jobs as jobs
from helpers.episodes import ONE, TWO, Echo, echoing, request
from helpers.sources import char
from helpers.training_jobs import Setup

from hybridflow.core.contracts.environment import Answer, Environment
from hybridflow.core.contracts.failure import FailureRule
from hybridflow.core.errors import EnvironmentFailure
from hybridflow.core.job.sections import EnvironmentSection
from hybridflow.core.values.parallel import ParallelLayout
from hybridflow.core.workers import episode_runner
from hybridflow.core.workers.episode_runner import run_episodes
from hybridflow.core.workers.episodes import Episodes

DIGITS = char()


def play(speaker, spec: Episodes, rows: int = 6, **settings):
    """A batch of so many rows, played with further settings of [environment]."""
    spec = attrs.evolve(spec, section=attrs.evolve(spec.section, **settings))
    return run_episodes(
        speaker[0], [request(at=at) for at in range(rows)], [{}] * rows, spec, speaker[1]
    )


def test_a_batch_of_episodes_has_masks_turns_and_returns(speaker):
    Echo.closed.clear()
    made = run_episodes(
        speaker[0], [request(at=at) for at in range(6)], [{}] * 6, echoing(DIGITS), speaker[1]
    )
    answered = 0
    for ids, mask, turn, version in zip(
        made["response_ids"], made["loss_mask"], made["turn"], made["weight_version"], strict=True
    ):
        assert torch.equal(mask.bool(), turn >= 0)
        assert version.tolist() == torch.where(mask.bool(), 5, -1).tolist()
        assert set(ids[~mask.bool()].tolist()) <= {ONE, TWO}
        answered += int(turn.max() > 0)
    assert answered
    returns, rewards = torch.as_tensor(made["episode_return"].values), made["turn_rewards"].values
    assert returns.tolist() == [sum(row) for row in rewards]
    assert made.metrics["turns"] == pytest.approx(sum(map(len, rewards)) / 6)
    assert made.metrics["episode_return"] == pytest.approx(float(returns.mean()))
    assert [len(row) for row in made["turn_states"].values] == [len(row) for row in rewards]
    assert len(Echo.closed) == 6


def test_all_environments_are_closed_when_one_fails(speaker):
    Echo.closed.clear()
    with pytest.raises(EnvironmentFailure, match="no such tool"):
        run_episodes(
            speaker[0],
            [request(at=at) for at in range(6)],
            [{}] * 6,
            echoing(DIGITS, raises="step"),
            speaker[1],
        )
    assert len(Echo.closed) == 6


def test_on_several_ranks_the_first_has_the_environment_and_all_hear_of_it(ranks, folder):
    setup = Setup(
        folder("llama"), layout=ParallelLayout(dp=2), engine="transformers", generation_tp=2
    )
    first, second = ranks(jobs.on_two_ranks, 2, setup)
    assert first[:2] == second[:2]
    assert any(returned > 0.5 for returned in first[1])  # of more than one turn
    assert (first[2], second[2]) == (4, 0)
    assert first[3] == second[3]
    assert "no such tool" in first[3][0] and "RuntimeError: no text" in first[3][1]


class Together(Environment):
    """Its answers wait for those of all others of the round."""

    meet = threading.Barrier(6, timeout=20)

    def reset(self, start):
        Together.meet.wait()
        return Answer("1+")

    def step(self, turn):
        return Answer(done=True)


def test_the_environments_of_a_round_answer_at_the_same_time(speaker):
    spec = Episodes(EnvironmentSection(f"{__name__}:Together"), DIGITS)
    assert play(speaker, spec).rows == 6


class Slow(Environment):
    """The first row's answer waits until another episode has come to its second turn."""

    stops = ("=",)
    ended = threading.Event()

    def reset(self, start):
        self.first = start.seed == 40
        return Answer("1+")

    def step(self, turn):
        if self.first and not Slow.ended.wait(20):
            raise TimeoutError("no other episode went on")
        if turn.number == 1:
            Slow.ended.set()
        return Answer("2+", done=turn.number == 1)


def test_free_episodes_go_on_while_others_wait(speaker):
    Slow.ended.clear()
    spec = Episodes(EnvironmentSection(f"{__name__}:Slow"), DIGITS)
    made = play(speaker, spec, rows=8, free=True)
    assert Slow.ended.is_set() and made.rows == 8


def test_free_episodes_say_what_they_say_in_rounds(speaker):
    rounds = play(speaker, echoing(DIGITS))
    free = play(speaker, echoing(DIGITS), free=True)
    for column in ("response_ids", "turn", "weight_version", "loss_mask"):
        for one, other in zip(rounds[column], free[column], strict=True):
            assert torch.equal(one, other), column
    for column in ("finish_reason", "turn_rewards", "turn_states"):
        assert rounds[column].values == free[column].values
    for one, other in zip(rounds["rollout_logprobs"], free["rollout_logprobs"], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-5)  # other batches, other rounding


class Hangs(Environment):
    go_on = threading.Event()

    def step(self, turn):
        Hangs.go_on.wait()
        return Answer(done=True)


@pytest.mark.parametrize("free", [False, True])
def test_an_answer_past_its_time_limit_is_a_failure_that_names_the_limit(speaker, free, caplog):
    Hangs.go_on.clear()
    spec = Episodes(EnvironmentSection(f"{__name__}:Hangs"), DIGITS)
    with pytest.raises(EnvironmentFailure, match=r"timeout_s = 0\.1 s.*\[row"):
        play(speaker, spec, free=free, timeout_s=0.1)
    assert "calls of environment" in caplog.text and "still run" in caplog.text
    Hangs.go_on.set()
    assert play(speaker, echoing(DIGITS)).rows == 6  # the engine is as it was


class Answers(Environment):
    """The first row fails while another one answers; no environment is closed in the midst of an answer."""

    inside = threading.Event()
    closed_while_answering = False

    def reset(self, start):
        self.answering = False
        if start.seed == 40:
            assert Answers.inside.wait(20)
            raise OSError("no port")
        if start.seed == 41:
            self.answering = True
            Answers.inside.set()
            threading.Event().wait(0.2)
            self.answering = False
        return Answer("1+")

    def step(self, turn):
        return Answer(done=True)

    def close(self):
        Answers.closed_while_answering |= self.answering


def test_an_environment_that_answers_is_not_closed_before_it_has(speaker):
    spec = Episodes(EnvironmentSection(f"{__name__}:Answers"), DIGITS)
    with pytest.raises(EnvironmentFailure, match="no port"):
        play(speaker, spec, free=True)
    assert Answers.inside.is_set() and not Answers.closed_while_answering


class Awaited(Environment):
    async def reset(self, start):
        return Answer("1+")

    async def step(self, turn):
        return Answer("2+", reward=1.0, done=turn.number > 0)


@pytest.mark.parametrize("free", [False, True])
def test_environments_may_be_async(speaker, free):
    spec = Episodes(EnvironmentSection(f"{__name__}:Awaited"), DIGITS)
    made = play(speaker, spec, free=free)
    assert max(map(sum, made["turn_rewards"].values)) >= 1.0


def test_only_so_many_environments_are_asked_at_once(speaker):
    made = play(speaker, echoing(DIGITS), at_once=1)
    assert [row.tolist() for row in made["response_ids"]] == [
        row.tolist() for row in play(speaker, echoing(DIGITS))["response_ids"]
    ]


class Flaky(Environment):
    """Its tool fails once in each episode whose seed is even, or for ever."""

    stops = ("=",)
    failed: set[int] = set()
    made: list[Flaky] = []
    closed: list[Flaky] = []

    def __init__(self, always: bool = False):
        self.always = always

    def reset(self, start):
        Flaky.made.append(self)
        self.seed = start.seed
        return Answer("1+")

    def step(self, turn):
        if self.seed % 2 == 0 and (self.always or self.seed not in Flaky.failed):
            Flaky.failed.add(self.seed)
            raise ConnectionError("gone")
        return Answer("2+", reward=1.0, done=turn.ended or turn.number == 2)

    def close(self):
        Flaky.closed.append(self)


@pytest.fixture
def flaky():
    for heard in (Flaky.failed, Flaky.made, Flaky.closed):
        heard.clear()
    return Episodes(EnvironmentSection(f"{__name__}:Flaky"), DIGITS)


@pytest.mark.parametrize("free", [False, True])
def test_an_episode_that_begins_again_says_what_it_would_have_said(speaker, flaky, free):
    once = play(speaker, flaky, free=free, on_failure=FailureRule(retries=1))
    assert len(Flaky.failed) == 3 and len(Flaky.made) == 9
    assert set(Flaky.closed) == set(Flaky.made) and len(Flaky.closed) == 9
    never = play(speaker, flaky, free=free)  # each has failed before
    assert set(once["outcome"].values) <= {"complete", "truncated_tokens"}
    for one, other in zip(once["response_ids"], never["response_ids"], strict=True):
        assert torch.equal(one, other)
    assert once["turn_rewards"].values == never["turn_rewards"].values


@pytest.mark.parametrize("free", [False, True])
def test_the_others_go_on_without_an_episode_that_fails_for_ever(speaker, flaky, free):
    spec = attrs.evolve(flaky, section=attrs.evolve(flaky.section, options={"always": True}))
    made = play(speaker, spec, free=free, on_failure=FailureRule(retries=2, mask=True))
    assert made["outcome"].values[::2] == ["failed_tool"] * 3
    assert not any(mask.any() for mask in list(made["loss_mask"])[::2])
    assert all(mask.any() for mask in list(made["loss_mask"])[1::2])
    assert len(Flaky.made) == len(set(Flaky.closed)) == 3 + 3 * 3
    assert made.metrics["failed_tool"] == 0.5 and made.metrics["abandoned_threads"] == 0.0


@pytest.mark.parametrize("free", [False, True])
def test_a_hanging_tool_is_left_out_at_its_deadline_and_its_environment_closed(speaker, free):
    Hangs.go_on.clear()
    spec = Episodes(EnvironmentSection(f"{__name__}:Hangs"), DIGITS)
    made = play(speaker, spec, free=free, timeout_s=0.2, on_failure=FailureRule(mask=True))
    assert set(made["outcome"].values) <= {"failed_tool", "truncated_tokens"}
    assert made.metrics["abandoned_threads"] == made["outcome"].values.count("failed_tool") > 0
    Hangs.go_on.set()


@pytest.mark.parametrize("free", [False, True])
def test_an_episode_out_of_time_is_scored_as_it_is(speaker, free):
    Hangs.go_on.clear()
    spec = Episodes(EnvironmentSection(f"{__name__}:Hangs"), DIGITS)
    made = play(speaker, spec, free=free, episode_s=0.3)
    late = [row for row, one in enumerate(made["outcome"].values) if one == "truncated_time"]
    assert late and all(list(made["loss_mask"])[row].any() for row in late)
    assert all(made["turn_rewards"].values[row] == [0.0] for row in late)
    assert {made["finish_reason"].values[row] for row in late} == {"length"}
    Hangs.go_on.set()


class Busy(Environment):
    """Cannot be closed: the first one raises, the others hang."""

    gate = threading.Event()

    def reset(self, start):
        self.first = start.seed == 40
        return Answer("1+")

    def step(self, turn):
        return Answer(done=True)

    def close(self):
        if self.first:
            raise OSError("still busy")
        Busy.gate.wait(30)


def test_a_close_that_fails_or_hangs_is_told_and_not_waited_for(speaker, caplog, monkeypatch):
    Busy.gate.clear()
    monkeypatch.setattr(episode_runner, "CLOSE_S", 0.2)
    made = play(speaker, Episodes(EnvironmentSection(f"{__name__}:Busy"), DIGITS))
    Busy.gate.set()
    assert made.rows == 6 and made.metrics["abandoned_threads"] == 5
    assert "still busy" in caplog.text and "could not be closed in 0.2 s" in caplog.text
