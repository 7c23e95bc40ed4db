"""EnvironmentConformance: checks the episodes of an Environment.

Episodes end, their answers keep the contract, equal episodes get equal answers, and instances share
nothing.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hybridflow.core.contracts.environment import Answer, Environment, Start, Turn
from hybridflow.kit.testing.checks import missing_fixture, require

TEXTS = ("42", "no idea", "", "\u2603 <calc>1+1</calc>", "4" * 200)
"""Texts of a model's turns: right, wrong, empty, with a call of a tool, and long."""


def finished(value: Any) -> Any:
    """Return an answer; of an async environment's coroutine what it returns."""
    return asyncio.run(value) if inspect.iscoroutine(value) else value


class EnvironmentConformance:
    """Subclass it and give a fixture `make`.

    It is a function () -> a new instance of your Environment.
    """

    most_turns = 50
    """Number of turns after which an unfinished episode is left; [environment] has max_turns."""

    @pytest.fixture
    def make(self) -> Callable[[], Environment]:
        """The author's function that makes a new instance."""
        return missing_fixture(self, "make", "a function () -> a new instance of your Environment")

    @staticmethod
    def start(prompt: str = "6*7=", seed: int = 0, **meta: Any) -> Start:
        """Return what an episode begins with; `meta` adds fields to answer = "42"."""
        return Start(prompt, {"answer": "42", **meta}, seed)

    @staticmethod
    def turn(text: str, number: int = 0, ended: bool = True) -> Turn:
        """Return a turn of the model; its token ids are the bytes of the text."""
        characters = np.frombuffer(text.encode(), dtype=np.uint8)
        return Turn(number, text, characters.astype(np.int64), ended)

    def episode(self, environment: Environment, texts: tuple[str, ...] = TEXTS) -> list[Answer]:
        """Return the answers of one episode: first that of reset, then one for each turn.

        The turns take these texts in order, again and again, until the episode is done.
        """
        answers = [finished(environment.reset(self.start()))]
        for number in range(self.most_turns):
            text = texts[number % len(texts)]
            answers.append(finished(environment.step(self.turn(text, number))))
            if not isinstance(answers[-1], Answer) or answers[-1].done:
                break

        environment.close()
        return answers

    def test_every_answer_is_one_to_go_on_with(self, make):
        """Answers have a finite reward, and after a turn a text unless the episode is done."""
        for answer in self.episode(make()):
            require(
                isinstance(answer, Answer) and np.isfinite(answer.reward),
                got=repr(answer),
                expected="an Answer with a finite reward",
                likely="reset or step returns something else, or divides by nothing",
            )

        # The answer of reset may be empty, for the prompt alone can begin an episode.
        for answer in self.episode(make())[1:]:
            require(
                answer.done or answer.text,
                got=f"{answer!r}",
                expected="an answer that is done, or has a text to go on from",
                likely="a branch of step that forgets its text",
            )

    def test_equal_episodes_get_equal_answers(self, make):
        """Two instances answer the same turns and seed alike."""
        one = self.episode(make())
        other = self.episode(make())
        require(
            one == other,
            got=f"{other}",
            expected=f"{one}: an episode has its seed and its turns, and nothing else",
            likely="chance that is not drawn from start.seed, or state that instances share",
        )

    def test_a_second_episode_knows_nothing_of_the_first(self, make):
        """An unfinished episode of one instance changes no answer of another."""
        alone = self.episode(make())

        # The first episode is still open while the second one runs.
        first = make()
        second = make()
        finished(first.reset(self.start()))
        finished(first.step(self.turn("between")))
        after = self.episode(second)
        first.close()
        require(
            after == alone,
            got=f"{after}",
            expected=f"{alone}",
            likely="class attributes that are written, or files of one name",
        )

    def test_it_can_be_closed_before_and_after_an_episode(self, make):
        """close() raises nothing on a fresh instance, nor during an episode."""
        make().close()

        environment = make()
        finished(environment.reset(self.start()))
        environment.close()
