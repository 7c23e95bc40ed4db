"""Episodes: what the model and its environment say, token by token."""

from __future__ import annotations

import math
import threading
import time

import attrs
import numpy as np
import pytest
import torch
from helpers.episodes import END, ONE, PLUS, STOP_ID as STOP, TWO, echoing, hears, request
from helpers.sources import char

from hybridflow.core.contracts.environment import Answer, Environment, Start
from hybridflow.core.contracts.failure import FailureRule
from hybridflow.core.contracts.rollout import Completion
from hybridflow.core.errors import ConfigError, EnvironmentFailure
from hybridflow.core.job.sections import EnvironmentSection
from hybridflow.core.workers import episodes
from hybridflow.core.workers.environment_calls import Answered
from hybridflow.core.workers.episodes import Attempt, Episode, Episodes, episode_batch

DIGITS = char()


def episode(max_turns: int = 8, max_tokens: int = 16, **options) -> Episode:
    """One that has begun."""
    made = Episode(
        echoing(DIGITS, max_turns, **options), request(max_tokens), {"answer": "3"}, (STOP,)
    )
    hears(made)
    return made


def says(one: Episode, *new: int, reason: str = "stop"):
    """The model goes on with these tokens; its turn."""
    ids = np.concatenate([one.ids, new]).astype(np.int64)
    logprobs = np.concatenate([one.logprobs, np.full(len(new), -0.5)])
    versions = np.concatenate([one.versions, np.full(len(new), 3)])
    asks = one.made(Completion(0, ids, logprobs, versions, reason))
    return one.turn if asks else None


def test_an_environment_begins_with_the_prompt_and_the_rows_fields():
    one = episode(opening="2+")
    assert one.attempt.environment.start == Start("1+2", {"answer": "3"}, 40)
    assert one.ids.tolist() == [TWO, PLUS]
    assert one.turns.tolist() == [-1, -1]


def test_tokens_of_both_stand_in_their_order_with_their_turn_and_version():
    one = episode(said="2+")
    turn = says(one, ONE, STOP)
    assert (turn.number, turn.text, turn.ids.tolist(), turn.ended) == (0, "1=", [ONE, STOP], False)
    hears(one)
    turn = says(one, ONE, END)
    assert (turn.number, turn.text, turn.ids.tolist(), turn.ended) == (1, "1", [ONE, END], True)
    hears(one)
    assert one.ids.tolist() == [ONE, STOP, TWO, PLUS, ONE, END]
    assert one.turns.tolist() == [0, 0, -1, -1, 1, 1]
    assert one.versions.tolist() == [3, 3, -1, -1, 3, 3]
    assert one.logprobs.tolist() == [-0.5, -0.5, 0, 0, -0.5, -0.5]
    assert (one.rewards, one.states, one.outcome) == ([0.5, 1.5], ["begin", "after 0"], "complete")


def test_the_model_goes_on_after_what_was_said():
    one = episode(said="2+")
    says(one, ONE, STOP)
    hears(one)
    asked = one.next_request()
    assert asked.prompt_ids.tolist() == [1, ONE, PLUS, TWO]
    assert asked.context().tolist() == [1, ONE, PLUS, TWO, ONE, STOP, TWO, PLUS]
    _, logprobs, versions = asked.prefix()
    assert (logprobs.tolist(), versions.tolist()) == ([-0.5, -0.5, 0, 0], [3, 3, -1, -1])


def test_an_episode_ends_by_length_inside_a_turn_inside_an_answer_and_after_the_last_turn():
    cut = episode(max_tokens=2)
    assert says(cut, ONE, TWO, reason="length") is None
    # A turn that was cut has no reward of its own.
    assert (cut.outcome, cut.rewards) == ("truncated_tokens", [0.0])
    full = episode(max_tokens=3, said="12")
    says(full, ONE, STOP)
    hears(full)
    assert (full.outcome, full.ids.tolist()) == ("truncated_tokens", [ONE, STOP, ONE])
    last = episode(max_turns=1)
    says(last, ONE, STOP)
    hears(last)
    assert (last.outcome, last.rewards) == ("truncated_turns", [0.5])


class Wrong(Environment):
    """Gives what the test says."""

    def __init__(self, gives):
        self.gives = gives

    def step(self, turn):
        return self.gives


@pytest.mark.parametrize(
    ("gives", "said"),
    [
        ("12", r"returned '12'; return an Answer \[after '1='\] \[row 0\]"),
        (Answer("1", reward=float("nan")), "gave the reward nan; it must be a finite number"),
        (Answer("1", reward="1"), "gave the reward '1'; it must be a finite number"),
        (Answer(""), "answered '' and the episode is not done"),
        (Answer("1="), "answered '1=' and the episode is not done"),
        (Answer(ids=(ONE, STOP)), "answered '1=' and the episode is not done"),
        (Answer(ids=(ONE, 99)), "answered with the token 99; the tokenizer has 0 to"),
        (Answer("1", ids=(ONE,)), "answered with a text and with ids; give one of them"),
        (Answer("1", max_tokens=0), "gave max_tokens = 0; give at least 1, or None"),
        (Answer("1", after=2), "gave after = 2, and the row has 2 tokens; give the index of one"),
        (Answer("1", keep=1, after=1), "gave after = 1, and the row has 1 tokens"),
        (Answer("1", after=-3), "gave after = -3"),
        (Answer(after=-2), "gave after = -2"),
        (Answer(after=1), "answered '' and the episode is not done"),
        (Answer("1", keep=0), "gave keep = 0; the turn has 2 tokens: give 1 or more of them"),
        (Answer("1", keep=3), "gave keep = 3; the turn has 2 tokens: give 1 or more of them"),
    ],
)
def test_an_answer_that_is_none_is_refused_with_the_row(gives, said):
    spec = Episodes(EnvironmentSection(f"{__name__}:Wrong", options={"gives": gives}), DIGITS)
    one = Episode(spec, request(), {}, (STOP,))
    hears(one)
    says(one, ONE, STOP)
    with pytest.raises(EnvironmentFailure, match=said):
        hears(one)


class Own(Environment):
    """Begins with tokens of its own, and limits the first turn to two."""

    own_prompt = True

    def __init__(self, prompt=(TWO, PLUS), keep=None):
        self.prompt, self.keep = tuple(prompt), keep
        self.seen = []

    def reset(self, start):
        self.start = start
        return Answer(ids=self.prompt, max_tokens=2, keep=self.keep)

    def step(self, turn):
        self.seen.append(turn)
        return Answer(ids=(PLUS, TWO))


def owning(limit: int = 0, mask: bool = False, max_tokens: int = 16, **options) -> Episode:
    section = EnvironmentSection(
        f"{__name__}:Own", options=options, on_failure=FailureRule(mask=mask)
    )
    return Episode(Episodes(section, DIGITS, limit), request(max_tokens), {}, ())


def test_an_environment_may_begin_with_a_prompt_of_its_own_in_tokens():
    one = owning()
    hears(one)
    assert one.attempt.environment.start.tokenizer is DIGITS
    assert one.next_request().context().tolist() == [TWO, PLUS] and one.ids.tolist() == []
    says(one, ONE, END)
    hears(one)
    assert one.next_request().context().tolist() == [TWO, PLUS, ONE, END, PLUS, TWO]
    one.outcome = "complete"
    made = episode_batch([one, episode(opening="2")])
    assert [row.tolist() for row in made["prompt_ids"]] == [[TWO, PLUS], [1, ONE, PLUS, TWO]]
    assert next(iter(made["response_ids"])).tolist() == [ONE, END, PLUS, TWO]
    assert next(iter(made["loss_mask"])).tolist() == [1, 1, 0, 0]
    # On every rank of an agent, so that their means can be put together.
    assert made.metrics["branches"] == 0.0


class Elsewhere(Environment):
    """Goes on after the first token, then after the prompt, then with a conversation of its own."""

    def step(self, turn):
        ids = ((PLUS,), (), (TWO, TWO))
        return Answer(ids=ids[turn.number], after=(0, -1, -2)[turn.number], max_tokens=5)


def test_a_turn_may_go_on_elsewhere_than_at_the_end():
    spec = Episodes(EnvironmentSection(f"{__name__}:Elsewhere"), DIGITS)
    one = Episode(spec, request(max_tokens=12), {}, ())
    hears(one)
    seeds = [one.next_request().seed]
    stands = []
    for said in ((ONE, TWO), (PLUS, PLUS), (TWO, END)):
        asked = one.next_request()
        prefix = asked.prefix_ids
        assert len(asked.prefix_logprobs) == len(asked.prefix_versions) == len(prefix)
        made = np.concatenate([prefix, said]).astype(np.int64)
        logprobs = np.concatenate([asked.prefix_logprobs, np.full(2, -0.5)])
        versions = np.concatenate([asked.prefix_versions, np.full(2, 3)])
        assert one.made(Completion(0, made, logprobs, versions, "stop"))
        hears(one)
        asked = one.next_request()
        stands.append((asked.prompt_ids.tolist(), asked.prefix_ids.tolist()))
        seeds.append(asked.seed)
        # The limit is of the turn, and of the row, whose tokens count wherever they stand.
        room = min(5, 12 - len(one.ids))
        assert asked.sampling.max_tokens == len(asked.prefix_ids) + room
    prompt = [1, ONE, PLUS, TWO]
    assert stands == [(prompt, [ONE, PLUS]), (prompt, []), ([TWO], [TWO])]
    assert len(set(seeds)) == 4
    assert one.ids.tolist() == [ONE, TWO, PLUS, PLUS, PLUS, TWO, END, TWO, TWO]
    one.outcome = "complete"
    made = episode_batch([one])
    assert made["branches"].values == [[[2, 0], [5, -1], [7, -2]]]


class Short(Environment):
    """Keeps the first two tokens of the first turn, and one of the last."""

    def step(self, turn):
        return Answer("12", keep=2) if turn.number == 0 else Answer(done=True, keep=1)


def test_an_answer_leaves_out_what_a_turn_has_after_its_first_tokens():
    one = Episode(Episodes(EnvironmentSection(f"{__name__}:Short"), DIGITS), request(), {}, ())
    hears(one)
    says(one, ONE, PLUS, TWO, END)
    hears(one)
    following = one.next_request()
    assert following.prefix_ids.tolist() == [ONE, PLUS, ONE, TWO]
    assert len(following.prefix_logprobs) == len(following.prefix_versions) == 4
    says(one, TWO, TWO)
    hears(one)
    made = episode_batch([one])
    names = ("response_ids", "loss_mask", "turn", "rollout_logprobs", "weight_version")
    row = {name: list(made[name]) for name in names}
    assert row["response_ids"][0].tolist() == [ONE, PLUS, ONE, TWO, TWO]
    assert row["loss_mask"][0].tolist() == [1, 1, 0, 0, 1]
    assert row["turn"][0].tolist() == [0, 0, -1, -1, 1]
    assert len(row["rollout_logprobs"][0]) == len(row["weight_version"][0]) == 5


def test_a_turn_that_is_not_there_has_nothing_to_keep():
    one = owning(keep=1)
    with pytest.raises(EnvironmentFailure, match="gave keep = 1; no turn was made"):
        hears(one)


def test_an_answer_limits_the_turn_that_follows_which_the_environment_sees_cut():
    one = owning()
    hears(one)
    assert one.next_request().sampling.max_tokens == 2
    turn = says(one, ONE, TWO, reason="length")
    assert (turn.cut, turn.ended, turn.ids.tolist()) == (True, False, [ONE, TWO])
    assert turn.logprobs.tolist() == [-0.5, -0.5]
    hears(one)
    # The next answer has no limit, but the row's, beyond which a turn is not seen.
    assert one.next_request().sampling.max_tokens == 16
    assert says(one, *[ONE] * 12, reason="length") is None
    assert one.outcome == "truncated_tokens"

    # A limit beyond the row's own is none.
    short = owning(max_tokens=1)
    hears(short)
    assert short.next_request().sampling.max_tokens == 1
    assert says(short, ONE, reason="length") is None


@pytest.mark.parametrize(
    ("limit", "prompt", "said"),
    [
        (2, (ONE, PLUS, TWO), "gave a prompt of 3 tokens; data.max_prompt_tokens is 2"),
        (0, (), "gave no prompt, and has one of its own"),
    ],
)
def test_a_prompt_that_cannot_be_one_is_a_failure(limit, prompt, said, caplog):
    with pytest.raises(EnvironmentFailure, match=said):
        hears(owning(limit, prompt=prompt))
    one = owning(limit, mask=True, prompt=prompt)
    hears(one)
    assert one.outcome == "failed_environment"
    assert next(iter(episode_batch([one])["prompt_ids"])).tolist() == [1, ONE, PLUS, TWO]


def test_an_episode_that_begins_again_asks_for_its_prompt_again():
    one = owning()
    hears(one)
    one._begin_again()
    assert one.next_request().context().tolist() == [1, ONE, PLUS, TWO]
    assert one.next_request().sampling.max_tokens == 16


def test_a_failure_names_what_was_said_before_it():
    with pytest.raises(EnvironmentFailure, match=r"OSError: no port .* \[row 0\]"):
        episode(raises="reset")
    one = episode(raises="step")
    says(one, ONE, STOP)
    with pytest.raises(EnvironmentFailure, match=r"raised ValueError: no such tool \[after '1='\]"):
        hears(one)


def ruled(**settings) -> Episode:
    """One whose tool fails at the first turn, by a rule."""
    spec = echoing(DIGITS, raises="step", opening="2+")
    section = attrs.evolve(spec.section, on_failure=FailureRule(**settings))
    one = Episode(attrs.evolve(spec, section=section), request(), {}, (STOP,))
    hears(one)
    says(one, ONE, STOP)
    hears(one)
    return one


def test_an_episode_whose_tool_failed_begins_again_at_its_prompt_with_a_new_environment():
    one = ruled(retries=1)
    assert one.outcome is None and not one.begun and one.attempt.environment is None
    assert (one.ids.tolist(), one.rewards, one.states) == ([], [], [])
    hears(one)
    assert one.ids.tolist() == [TWO, PLUS] and one.attempt.environment is not None
    says(one, ONE, STOP)
    with pytest.raises(EnvironmentFailure, match="no such tool"):
        hears(one)


def test_a_failed_episode_is_left_out_where_the_rule_says_so(caplog):
    one, other = ruled(mask=True), episode()
    assert one.outcome == "failed_tool" and "the episode is left out" in caplog.text
    says(other, ONE, END)
    hears(other)
    made = episode_batch([one, other])
    assert made["outcome"].values == ["failed_tool", "complete"]
    assert made["finish_reason"].values == ["abort", "stop"]
    assert [row.tolist() for row in made["response_ids"]] == [[TWO, PLUS, ONE, STOP], [ONE, END]]
    assert [row.tolist() for row in made["loss_mask"]] == [[0, 0, 0, 0], [1, 1]]
    failed, kept = torch.as_tensor(made["episode_return"].values).tolist()
    assert math.isnan(failed) and kept == 0.5
    # Its turns and its return are no part of the means.
    figures = made.metrics.values()
    assert (figures["turns"], figures["episode_return"]) == (1.0, 0.5)
    assert (figures["failed_tool"], figures["complete"], figures["truncated_turns"]) == (
        0.5,
        0.5,
        0,
    )


def test_an_environment_that_cannot_begin_is_no_tool_that_fails():
    spec = echoing(DIGITS, raises="reset")
    section = attrs.evolve(spec.section, on_failure=FailureRule(mask=True))
    one = Episode(attrs.evolve(spec, section=section), request(), {}, (STOP,))
    hears(one)
    assert one.outcome == "failed_environment"


def test_an_episode_whose_time_is_over_ends_after_the_answer_or_without_it(monkeypatch):
    spec = echoing(DIGITS)
    spec = attrs.evolve(spec, section=attrs.evolve(spec.section, episode_s=60.0))
    now = time.monotonic()
    ended = []
    for answered in (Answered(Answer("12", reward=2.0)), Answered(late=True)):
        one = Episode(spec, request(), {}, (STOP,))
        hears(one)
        says(one, ONE, STOP)
        call = one.next_call()
        assert callable(call) and one.deadline >= now + 60
        monkeypatch.setattr(episodes.time, "monotonic", lambda end=one.deadline: end)
        one.take(one.said(answered))
        monkeypatch.undo()
        ended.append((one.outcome, one.rewards, one.ids.tolist()))
    assert ended == [
        ("truncated_time", [2.0], [ONE, STOP, ONE, TWO]),
        ("truncated_time", [0.0], [ONE, STOP]),
    ]


def test_an_answer_without_end_is_cut_before_it_is_tokenised():
    said = []

    class Counting:
        def encode(self, text):
            said.append(len(text))
            return DIGITS.encode(text)

        def decode(self, ids):
            return DIGITS.decode(ids)

    spec = Episodes(
        EnvironmentSection("helpers.episodes:Echo", options={"said": "1" * 10**7}), Counting()
    )
    one = Episode(spec, request(max_tokens=8), {}, (STOP,))
    hears(one)
    says(one, ONE, STOP)
    hears(one)
    assert one.outcome == "truncated_tokens" and len(one.ids) == 8 and max(said) <= 256 * 8


def test_an_environment_that_is_given_up_while_it_is_made_is_closed():
    gate = threading.Event()
    closed = []

    class Late(Environment):
        def __init__(self):
            gate.wait(10)

        def step(self, turn):
            raise AssertionError

        def close(self):
            closed.append(self)

    attempt = Attempt(EnvironmentSection("late"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(episodes, "make_environment", lambda name, options: Late(**options))
        thread = threading.Thread(target=attempt.begin, args=(Start("", {}, 0),))
        thread.start()
        assert attempt.retire() is None
        gate.set()
        thread.join(10)
    assert len(closed) == 1 and attempt.retire() is None


class LongStop(Environment):
    stops = ("+", "10")

    def step(self, turn):
        return Answer(done=True)


def test_stops_are_tokens():
    echoing(DIGITS).check()
    assert echoing(DIGITS).stop_ids() == (STOP,)
    with pytest.raises(ConfigError, match="'10', which is 2 tokens"):
        Episodes(EnvironmentSection(f"{__name__}:LongStop"), DIGITS).stop_ids()
