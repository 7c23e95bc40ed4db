"""An environment for tests, and the rows that meet it."""

from __future__ import annotations

import contextlib

import numpy as np

from hybridflow.backends.transformers.config import TransformersEngineConfig
from hybridflow.backends.transformers.engine import TransformersEngine
from hybridflow.core.contracts.environment import Answer, Environment
from hybridflow.core.contracts.rollout import Request, SamplingParams
from hybridflow.core.job.sections import EnvironmentSection
from hybridflow.core.workers.environment_calls import Answered
from hybridflow.core.workers.episodes import Episode, Episodes
from hybridflow.kit.testing import give_weights, one_rank, reference

STOP = "="
ONE, TWO, PLUS, END = 4, 5, 13, 2
"""Ids of "1", "2", "+" and of the end of text in `helpers.sources.char`."""
STOP_ID = 14


def request(max_tokens: int = 16, at: int = 0) -> Request:
    """Row `at` of a batch; a bias makes turns end by the stop."""
    sampling = SamplingParams(
        max_tokens=max_tokens, stop_token_ids=(END, STOP_ID), logit_bias={STOP_ID: 2.0}
    )
    return Request(at, np.array([1, ONE, PLUS, TWO]), sampling, seed=40 + at)


class Echo(Environment):
    """Answers every turn with `said`; the turn number `last`, or the end of the text, ends the episode."""

    stops = (STOP,)
    opened: list[Echo] = []
    closed: list[Echo] = []

    def __init__(self, said: str = "12", opening: str = "", last: int = 99, raises: str = ""):
        self.said, self.opening, self.last, self.raises = said, opening, last, raises

    def reset(self, start):
        self.start = start
        if self.raises == "reset":
            raise OSError("no port")
        Echo.opened.append(self)
        return Answer(self.opening, state="begin")

    def step(self, turn):
        if self.raises == "step":
            raise ValueError("no such tool")
        done = turn.ended or turn.number >= self.last
        return Answer(self.said, reward=0.5 + turn.number, done=done, state=f"after {turn.number}")

    def close(self):
        Echo.closed.append(self)
        if self.raises == "close":
            raise OSError("still busy")


def hears(episode: Episode) -> None:
    """The episode takes what its environment answers."""
    try:
        answered = Answered(episode.next_call()())
    except Exception as error:
        answered = Answered(error=error)
    episode.take(episode.said(answered))


def echoing(tokenizer, max_turns: int = 8, **options) -> Episodes:
    """Its options and the tokenizer, as a worker has them."""
    return Episodes(EnvironmentSection("helpers.episodes:Echo", max_turns, options), tokenizer)


@contextlib.contextmanager
def speaking():
    """An engine with the weights of `reference` as version 5, and its context."""
    with one_rank() as context:
        engine = TransformersEngine(reference().spec, TransformersEngineConfig(), context)
        engine.start()
        give_weights(engine, reference().parameters, 5)
        yield engine, context
