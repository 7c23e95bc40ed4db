"""Episodes: what the model and its environment say, token by token."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from helpers.episodes import END, ONE, PLUS, STOP_ID as STOP, TWO, echoing, hears, request
from helpers.sources import char

from hybridflow.core.contracts.environment import Answer, Environment, Start
from hybridflow.core.contracts.rollout import Completion
from hybridflow.core.errors import ConfigError, EnvironmentFailure
from hybridflow.core.job.sections import EnvironmentSection
from hybridflow.core.workers.episodes import Episode, Episodes

DIGITS = char()


def episode(max_turns: int = 8, max_tokens: int = 16, **options) -> Episode:
    """One that has begun."""
    made = Episode(
        echoing(DIGITS, max_turns, **options), request(max_tokens), {"answer": "3"}, (STOP,)
    )
    hears(made, made.begin)
    return made


def says(one: Episode, *new: int, reason: str = "stop"):
    """The model goes on with these tokens; its turn."""
    ids = np.concatenate([one.ids, new]).astype(np.int64)
    logprobs = np.concatenate([one.logprobs, np.full(len(new), -0.5)])
    versions = np.concatenate([one.versions, np.full(len(new), 3)])
    return one.made(Completion(0, ids, logprobs, versions, reason))


def test_an_environment_begins_with_the_prompt_and_the_rows_fields():
    one = episode(opening="2+")
    assert one.environment.start == Start("1+2", {"answer": "3"}, 40)
    assert one.ids.tolist() == [TWO, PLUS]
    assert one.turns.tolist() == [-1, -1]


def test_tokens_of_both_stand_in_their_order_with_their_turn_and_version():
    one = episode(said="2+")
    turn = says(one, ONE, STOP)
    assert (turn.number, turn.text, turn.ids.tolist(), turn.ended) == (0, "1=", [ONE, STOP], False)
    hears(one, lambda: one.answer(turn))
    turn = says(one, ONE, END)
    assert (turn.number, turn.text, turn.ids.tolist(), turn.ended) == (1, "1", [ONE, END], True)
    hears(one, lambda: one.answer(turn))
    assert one.ids.tolist() == [ONE, STOP, TWO, PLUS, ONE, END]
    assert one.turns.tolist() == [0, 0, -1, -1, 1, 1]
    assert one.versions.tolist() == [3, 3, -1, -1, 3, 3]
    assert one.logprobs.tolist() == [-0.5, -0.5, 0, 0, -0.5, -0.5]
    assert (one.rewards, one.states, one.reason) == ([0.5, 1.5], ["begin", "after 0"], "stop")


def test_the_model_goes_on_after_what_was_said():
    one = episode(said="2+")
    hears(one, lambda: one.answer(says(one, ONE, STOP)))
    asked = one.next_request()
    assert asked.prompt_ids.tolist() == [1, ONE, PLUS, TWO]
    assert asked.context().tolist() == [1, ONE, PLUS, TWO, ONE, STOP, TWO, PLUS]
    _, logprobs, versions = asked.prefix()
    assert (logprobs.tolist(), versions.tolist()) == ([-0.5, -0.5, 0, 0], [3, 3, -1, -1])


def test_an_episode_ends_by_length_inside_a_turn_inside_an_answer_and_after_the_last_turn():
    cut = episode(max_tokens=2)
    assert says(cut, ONE, TWO, reason="length") is None
    assert (cut.reason, cut.rewards) == (
        "length",
        [0.0],
    )  # a turn that was cut has no reward of its own
    full = episode(max_tokens=3, said="12")
    hears(full, lambda: full.answer(says(full, ONE, STOP)))
    assert (full.reason, full.ids.tolist()) == ("length", [ONE, STOP, ONE])
    last = episode(max_turns=1)
    hears(last, lambda: last.answer(says(last, ONE, STOP)))
    assert (last.reason, last.rewards) == ("length", [0.5])


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
    ],
)
def test_an_answer_that_is_none_is_refused_with_the_row(gives, said):
    spec = Episodes(EnvironmentSection(f"{__name__}:Wrong", options={"gives": gives}), DIGITS)
    one = Episode(spec, request(), {}, (STOP,))
    hears(one, one.begin)
    turn = says(one, ONE, STOP)
    with pytest.raises(EnvironmentFailure, match=said):
        hears(one, lambda: one.answer(turn))


def test_a_failure_names_what_was_said_before_it_and_a_close_that_fails_is_only_told(caplog):
    with pytest.raises(EnvironmentFailure, match=r"OSError: no port .* \[row 0\]"):
        episode(raises="reset")
    one = episode(raises="step")
    with pytest.raises(EnvironmentFailure, match=r"raised ValueError: no such tool \[after '1='\]"):
        hears(one, lambda: one.answer(says(one, ONE, STOP)))
    with caplog.at_level(logging.ERROR):
        episode(raises="close").close()
    assert "could not be closed" in caplog.text and "still busy" in caplog.text


class LongStop(Environment):
    stops = ("+", "10")

    def step(self, turn):
        return Answer(done=True)


def test_stops_are_tokens():
    assert echoing(DIGITS).stop_ids() == (STOP,)
    with pytest.raises(ConfigError, match="'10', which is 2 tokens"):
        Episodes(EnvironmentSection(f"{__name__}:LongStop"), DIGITS).stop_ids()
