"""Every invariant of EnvironmentConformance notices the fault that it is for."""

from __future__ import annotations

import random
import sqlite3
import time

import numpy as np
import pytest
from helpers.expect import caught, each_fault, each_invariant

from hybridflow.core.contracts.environment import Answer, Environment
from hybridflow.kit.testing.environments import EnvironmentConformance


class Guess(Environment):
    """Done by the answer, or by the fourth turn."""

    def reset(self, start):
        self.answer = start.meta["answer"]
        self.noise = np.random.default_rng(start.seed)
        return Answer("guess: ")

    def step(self, turn):
        if turn.text == self.answer or turn.number == 3:
            return Answer(reward=float(turn.text == self.answer), done=True)
        return Answer(f"no, {self.noise.integers(10)}: ", reward=-0.1)


class AnswersNothing(Guess):
    def step(self, turn):
        return None


class BeginsWithNothing(Guess):
    def reset(self, start):
        super().reset(start)


class NoNumber(Guess):
    def step(self, turn):
        return Answer("again", reward=float("nan"))


class ForgetsItsText(Guess):
    def step(self, turn):
        return Answer(reward=-0.1)


class Chance(Guess):
    def step(self, turn):
        return Answer("done", reward=random.random(), done=True)


class CountsEpisodes(Guess):
    count = 0

    def reset(self, start):
        super().reset(start)
        CountsEpisodes.count += 1
        return Answer(f"episode {self.count}")


class SharedTurns(Guess):
    """The first instance's turns are seen by the second until somebody closes."""

    turns: list = []

    def step(self, turn):
        self.turns.append(turn.text)
        return Answer(f"turn {len(self.turns)}", done=turn.number == 2)

    def close(self):
        self.turns.clear()


class SeedsTheSharedGenerator(Guess):
    """By itself each episode is the same."""

    def reset(self, start):
        random.seed(start.seed)
        return super().reset(start)

    def step(self, turn):
        return Answer(f"{random.random()}", done=turn.number == 2)


class DrawsFromTheSharedGenerator(Guess):
    def reset(self, start):
        super().reset(start)
        kept = np.random.get_state()
        noise = np.random.random()
        np.random.set_state(kept)
        return Answer(f"{noise}")


class ThreadBound(Guess):
    def reset(self, start):
        super().reset(start)
        self.store = sqlite3.connect(":memory:")
        return Answer("guess: ")

    def step(self, turn):
        self.store.execute("select 1")
        return super().step(turn)

    def close(self):
        pass


class Mixed(Guess):
    """The last episode's noise is everybody's, from its reset to its end."""

    def reset(self, start):
        answer = super().reset(start)
        Mixed.shared = self.noise
        self.answer = None  # never guessed
        return answer

    def step(self, turn):
        time.sleep(0.01)
        self.noise = self.shared
        return super().step(turn)


FAULTS = {
    "test_every_answer_is_one_to_go_on_with": [
        AnswersNothing,
        BeginsWithNothing,
        NoNumber,
        ForgetsItsText,
    ],
    "test_equal_episodes_get_equal_answers": [Chance, CountsEpisodes],
    "test_a_second_episode_knows_nothing_of_the_first": [SharedTurns],
    "test_chance_is_drawn_from_the_seed_alone": [
        SeedsTheSharedGenerator,
        DrawsFromTheSharedGenerator,
    ],
    "test_episodes_side_by_side_are_those_of_each_alone": [ThreadBound, Mixed],
}
CLOSING = "test_it_can_be_closed_before_and_after_an_episode"


@each_fault(EnvironmentConformance, FAULTS, {CLOSING})
def test_the_fault_is_noticed(fault, method):
    caught(EnvironmentConformance, method, make=fault)


class ClosesWhatItNeverOpened(Guess):
    def close(self):
        del self.answer


def test_closing_before_an_episode_is_tried():
    with pytest.raises(AttributeError, match="answer"):
        getattr(EnvironmentConformance(), CLOSING)(ClosesWhatItNeverOpened)


class Awaited(Guess):
    async def reset(self, start):
        return Guess.reset(self, start)

    async def step(self, turn):
        return Guess.step(self, turn)

    async def close(self):
        pass


@pytest.mark.parametrize("good", [Guess, Awaited])
@each_invariant(EnvironmentConformance)
def test_a_good_environment_passes(method, good):
    getattr(EnvironmentConformance(), method)(good)


def test_an_episode_is_closed_and_has_an_answer_a_turn_until_it_is_done():
    class Counts(Guess):
        closed = 0

        def step(self, turn):
            return Answer(turn.text, done=turn.number == 2)

        def close(self):
            self.closed += 1

    environment = Counts()
    answers = EnvironmentConformance().episode(environment, ("a", "b"))
    assert [answer.text for answer in answers] == ["guess: ", "a", "b", "a"]
    assert environment.closed == 1


def test_an_episode_without_an_end_is_left_after_most_turns():
    class Short(EnvironmentConformance):
        most_turns = 3

    class Endless(Guess):
        def step(self, turn):
            return Answer("on")

    assert len(Short().episode(Endless())) == 4


def test_starts_and_turns_are_made_for_tests_of_ones_own():
    start = EnvironmentConformance.start("1+1=", seed=7, level=2)
    assert (start.prompt, start.seed, start.meta) == ("1+1=", 7, {"answer": "42", "level": 2})
    turn = EnvironmentConformance.turn("\u00e9", number=2, ended=False)
    assert (turn.number, turn.text, turn.ended) == (2, "\u00e9", False)
    assert turn.ids.tolist() == [0xC3, 0xA9] and turn.ids.dtype == np.int64
