"""EnvironmentConformance: episodes end, answers are what the contract says, equal episodes are alike, and nothing is shared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hybridflow.core.contracts.environment import Answer, Environment, Start, Turn
from hybridflow.kit.testing.checks import missing_fixture, require

TEXTS = ("42", "no idea", "", "\u2603 <calc>1+1</calc>", "4" * 200)


class EnvironmentConformance:
    """Give a fixture `make`: a function () -> a new instance of your Environment."""

    most_turns = 50
    """An episode that is not done after so many turns is taken to go on for ever; [environment] has max_turns for that."""

    @pytest.fixture
    def make(self) -> Callable[[], Environment]:
        return missing_fixture(self, "make", "a function () -> a new instance of your Environment")

    @staticmethod
    def start(prompt: str = "6*7=", seed: int = 0, **meta: Any) -> Start:
        """What an episode begins with; `meta` beside the answer "42"."""
        return Start(prompt, {"answer": "42", **meta}, seed)

    @staticmethod
    def turn(text: str, number: int = 0, ended: bool = True) -> Turn:
        ids = np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64)
        return Turn(number, text, ids, ended)

    def episode(self, environment: Environment, texts: tuple[str, ...] = TEXTS) -> list[Answer]:
        """The answers to turns with these texts, again and again, until it is done."""
        answers = [environment.reset(self.start())]
        for number in range(self.most_turns):
            answers.append(environment.step(self.turn(texts[number % len(texts)], number)))
            if not isinstance(answers[-1], Answer) or answers[-1].done:
                break
        environment.close()
        return answers

    def test_every_answer_is_one_to_go_on_with(self, make):
        for answer in self.episode(make()):
            require(
                isinstance(answer, Answer) and np.isfinite(answer.reward),
                got=repr(answer),
                expected="an Answer with a finite reward",
                likely="reset or step returns something else, or divides by nothing",
            )
        for answer in self.episode(make())[1:]:
            require(
                answer.done or answer.text,
                got=f"{answer!r}",
                expected="an answer that is done, or has a text to go on from",
                likely="a branch of step that forgets its text",
            )

    def test_equal_episodes_get_equal_answers(self, make):
        one, other = self.episode(make()), self.episode(make())
        require(
            one == other,
            got=f"{other}",
            expected=f"{one}: an episode has its seed and its turns, and nothing else",
            likely="chance that is not drawn from start.seed, or state that instances share",
        )

    def test_a_second_episode_knows_nothing_of_the_first(self, make):
        alone = self.episode(make())
        first, second = make(), make()
        first.reset(self.start())
        first.step(self.turn("between"))
        after = self.episode(second)
        first.close()
        require(
            after == alone,
            got=f"{after}",
            expected=f"{alone}",
            likely="class attributes that are written, or files of one name",
        )

    def test_it_can_be_closed_before_and_after_an_episode(self, make):
        make().close()
        environment = make()
        environment.reset(self.start())
        environment.close()
