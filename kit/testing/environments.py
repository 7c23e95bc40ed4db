"""EnvironmentConformance: checks the episodes of an Environment.

Episodes end, their answers keep the contract, chance comes from the seed alone, instances share
nothing, also side by side in threads, and can be closed at any time.
"""

from __future__ import annotations

import asyncio
import inspect
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from hybridflow.core.contracts.environment import Answer, Environment, Start, Turn
from hybridflow.kit.testing.checks import missing_fixture, require

TEXTS = ("42", "no idea", "", "\u2603 <calc>1+1</calc>", "4" * 200)
"""Texts of a model's turns: right, wrong, empty, with a call of a tool, and long."""


EPISODES = 4
"""Number of episodes that run side by side."""


def called(method: Callable[..., Any], *arguments: Any) -> Any:
    """Call a method of an environment; of an async one's coroutine return what it returns."""
    value = method(*arguments)
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

    def episode(
        self,
        environment: Environment,
        texts: tuple[str, ...] = TEXTS,
        seed: int = 0,
        call: Callable[..., Any] = called,
    ) -> list[Answer]:
        """Return the answers of one episode: first that of reset, then one for each turn.

        The turns take these texts in order, again and again, until the episode is done. `call`
        makes each call of the environment.
        """
        answers = [call(environment.reset, self.start(seed=seed))]
        for number in range(self.most_turns):
            text = texts[number % len(texts)]
            answers.append(call(environment.step, self.turn(text, number)))
            if not isinstance(answers[-1], Answer) or answers[-1].done:
                break

        call(environment.close)
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
                answer.done or answer.text or answer.ids,
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
        called(first.reset, self.start())
        called(first.step, self.turn("between"))
        after = self.episode(second)
        called(first.close)
        require(
            after == alone,
            got=f"{after}",
            expected=f"{alone}",
            likely="class attributes that are written, or files of one name",
        )

    def test_chance_is_drawn_from_the_seed_alone(self, make):
        """The generators of `random` and numpy, which all episodes share, are left alone."""
        kept = random.getstate(), np.random.get_state()
        answers = []
        try:
            for seed in (1, 2):
                random.seed(seed)
                np.random.seed(seed)
                before = random.getstate(), str(np.random.get_state())
                answers.append(self.episode(make()))
                require(
                    (random.getstate(), str(np.random.get_state())) == before,
                    got="the state of a shared generator has changed",
                    expected="no change: episodes run side by side in threads",
                    likely="random.seed or np.random.seed; make a generator of start.seed instead",
                )
        finally:
            random.setstate(kept[0])
            np.random.set_state(kept[1])
        require(
            answers[0] == answers[1],
            got=f"{answers[1]}",
            expected=f"{answers[0]}, whatever the shared generators' state is",
            likely="a draw of random or np.random; make a generator of start.seed instead",
        )

    def test_episodes_side_by_side_are_those_of_each_alone(self, make):
        """Episodes run at once, each call in a thread of its own, and nothing is mixed up."""
        alone = [self.episode(make(), seed=seed) for seed in range(EPISODES)]

        together = threading.Barrier(EPISODES, timeout=60)

        def episode(seed: int) -> list[Answer]:
            environment = make()
            together.wait()
            with ExitStack() as threads:

                def called_in_a_thread(method: Callable[..., Any], *arguments: Any) -> Any:
                    # It lives on, since a later thread might have its number.
                    thread = threads.enter_context(ThreadPoolExecutor(1))
                    return thread.submit(called, method, *arguments).result()

                return self.episode(environment, seed=seed, call=called_in_a_thread)

        with ThreadPoolExecutor(EPISODES) as threads:
            running = [threads.submit(episode, seed) for seed in range(EPISODES)]
            for seed, found in enumerate(running):
                error = found.exception()
                require(
                    error is None and found.result() == alone[seed],
                    got=f"{found.result()}" if error is None else repr(error),
                    expected=f"{alone[seed]}, as in an episode by itself",
                    likely="state that instances share, or that only its first thread may touch",
                )

    def test_it_can_be_closed_before_and_after_an_episode(self, make):
        """close() raises nothing on a fresh instance, nor during an episode."""
        called(make().close)

        environment = make()
        called(environment.reset, self.start())
        called(environment.close)
