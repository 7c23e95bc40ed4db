"""Episodes: turns of the model and answers of an environment.

    prompt -> reset -> [answer] -> turn -> step -> [answer] -> turn -> ... -> done, or no room left

Each turn is a request that goes on after what was written so far. Tokens in, tokens out: what the
model wrote is never tokenised again, and an answer is tokenised by itself. episode_runner.py plays
the episodes of a batch.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch

from hybridflow.core.contracts.environment import Answer, Environment, Start, Turn
from hybridflow.core.contracts.rollout import Completion, Request
from hybridflow.core.contracts.tokenizer import Tokenizer
from hybridflow.core.errors import ConfigError, EnvironmentFailure
from hybridflow.core.job.sections import EnvironmentSection
from hybridflow.core.plugins.resolve import environment_class
from hybridflow.core.values.batch import Batch
from hybridflow.core.values.columns import tokens
from hybridflow.core.values.metrics import Metrics
from hybridflow.core.values.text import shorten
from hybridflow.core.workers.environment_calls import Answered

log = logging.getLogger(__name__)
NOT_MADE = -1
"""The value for tokens of the environment in the columns turn and weight_version."""


@attrs.frozen
class Episodes:
    """The environment and the tokenizer by which a worker runs episodes."""

    section: EnvironmentSection
    """The environment's name, options and limits."""
    tokenizer: Tokenizer
    """The policy's tokenizer."""

    def stop_ids(self) -> tuple[int, ...]:
        """Return the tokens that end a turn. Raises ConfigError for a stop of several tokens."""
        section = self.section
        stops = []  # engines compare single tokens
        for text in environment_class(section.name, section.options).stops:
            ids = self.tokenizer.encode(text)
            if len(ids) != 1:
                raise ConfigError(
                    f"environment {section.name!r} ends turns with {text!r}, which is {len(ids)} "
                    "tokens of this tokenizer; choose a stop of one token, or another tokenizer"
                )
            stops.append(int(ids[0]))
        return tuple(stops)


class Episode:
    """One row: the tokens so far, with mask, logprob, weight version and turn of each."""

    def __init__(
        self, spec: Episodes, request: Request, meta: Mapping[str, Any], stops: tuple[int, ...]
    ):
        """Take the first turn's request, the row's fields, and the tokens that end a turn."""
        self.spec = spec
        self.request = request
        self.meta = meta
        self.stops = stops

        # For each token so far, the model's and the environment's.
        self.ids = np.zeros(0, np.int64)
        self.logprobs = np.zeros(0, np.float32)
        self.versions = np.zeros(0, np.int64)
        self.turns = np.zeros(0, np.int64)

        # For each turn so far; `reason` is None while the episode runs.
        self.rewards: list[float] = []
        self.states: list[str] = []
        self.reason: str | None = None
        self.begun = False
        """Whether the environment's first answer has come."""
        self.asked = ""
        """The text that the environment was given last."""
        self.environment: Environment | None = None

    def begin(self) -> Any:
        """Make the environment, and return its answer to the prompt, or a coroutine of it."""
        self.asked = self.spec.tokenizer.decode(self.request.prompt_ids)
        section = self.spec.section
        self.environment = environment_class(section.name, section.options)(**section.options)
        return self.environment.reset(Start(self.asked, self.meta, self.request.seed))

    def answer(self, turn: Turn) -> Any:
        """Return the environment's answer to the model's turn, or a coroutine of it."""
        assert self.environment is not None
        self.asked = turn.text
        return self.environment.step(turn)

    def close(self) -> None:
        """Close the environment. An error is logged, so that the other ones are closed too."""
        try:
            if self.environment is not None:
                self.environment.close()
        except Exception:
            log.exception("environment %r could not be closed", self.spec.section.name)

    def said(self, answered: Answered) -> dict[str, Any]:
        """Return an answer as plain values, which travel; a failure as {"error": its message}."""
        answer = answered.value
        if answered.late:
            problem = f"took longer than environment.timeout_s = {self.spec.section.timeout_s:g} s"
        elif (error := answered.error) is not None:
            problem = f"raised {type(error).__name__}: {error}"
        elif not isinstance(answer, Answer):
            problem = f"returned {answer!r:.80}; return an Answer"
        elif not isinstance(answer.reward, (int, float)) or not np.isfinite(answer.reward):
            problem = f"gave the reward {answer.reward!r}; it must be a finite number"
        else:
            return attrs.asdict(answer)

        # Every rank of the replica raises it, in `take`.
        name = self.spec.section.name
        return {"error": f"environment {name!r} {problem} [after {shorten(self.asked)}]"}

    def take(self, said: Mapping[str, Any]) -> None:
        """Append the environment's answer to the episode.

        The first one may be empty and has no reward. Raises EnvironmentFailure when the environment
        failed, or when no turn can follow its text.
        """
        first = not self.begun
        self.begun = True
        if "error" in said:
            raise EnvironmentFailure(f"{said['error']} [row {self.request.id}]")
        # The answer to a turn has the turn's reward.
        if not first:
            self.rewards.append(float(said["reward"]))
        if said["done"]:
            self.reason = "stop"
            return

        # An engine would treat a prefix that ends in a stop as a complete turn.
        sampling = self.request.sampling
        ids = np.zeros(0, np.int64)
        if said["text"]:
            ids = self.spec.tokenizer.encode(said["text"])
        missing = not first and not len(ids)
        if missing or (len(ids) and int(ids[-1]) in sampling.stop_token_ids):
            raise EnvironmentFailure(
                f"environment {self.spec.section.name!r} answered {said['text']!r} and the episode "
                "is not done; an answer needs a text that does not end as a turn does "
                f"[row {self.request.id}]"
            )

        # Cut off what exceeds the row's limit, which counts the environment's tokens too.
        room = sampling.max_tokens - len(self.ids)
        taken = ids[:room]
        logprobs = np.zeros(len(taken), np.float32)
        versions = np.full(len(taken), NOT_MADE)
        self._put(taken, logprobs, versions, NOT_MADE)
        # The row's limit is reached, or the number of turns.
        if len(ids) >= room or len(self.rewards) >= self.spec.section.max_turns:
            self.reason = "length"
        self.states.append(said["state"])

    def next_request(self) -> Request:
        """Return the request for the model's next turn, whose prefix is all tokens so far."""
        return attrs.evolve(
            self.request,
            prefix_ids=self.ids,
            prefix_logprobs=self.logprobs,
            prefix_versions=self.versions,
        )

    def made(self, done: Completion) -> Turn | None:
        """Append the model's turn to the episode, and return it; None where the episode ends."""
        start = len(self.ids)
        new = done.response_ids[start:]
        versions = done.weight_version[start:]
        self._put(new, done.logprobs[start:], versions, len(self.rewards))

        # Cut off by its length, or aborted: the environment does not see the turn.
        if done.finish_reason != "stop":
            self.reason = done.finish_reason
            self.rewards.append(0.0)
            return None

        # A stop of the request itself ends a turn too, and is no stop of the environment.
        text = self.spec.tokenizer.decode(new)
        stopped = len(new) and int(new[-1]) in self.stops
        return Turn(len(self.rewards), text, new, not stopped)

    def _put(self, ids: np.ndarray, logprobs: np.ndarray, versions: np.ndarray, turn: int) -> None:
        self.ids = np.concatenate([self.ids, ids])
        self.logprobs = np.concatenate([self.logprobs, logprobs.astype(np.float32)])
        self.versions = np.concatenate([self.versions, versions])
        self.turns = np.concatenate([self.turns, np.full(len(ids), turn)])


def episode_batch(episodes: Sequence[Episode]) -> Batch:
    """Return the columns of ended episodes; their mean return and number of turns are metrics."""
    ids = tokens([episode.ids for episode in episodes], torch.int64)
    turns = tokens([episode.turns for episode in episodes], torch.int32)
    returns = torch.tensor([sum(episode.rewards) for episode in episodes], dtype=torch.float32)
    masks = [episode.turns != NOT_MADE for episode in episodes]

    # No turn is taken in the state after the last turn, so it is left out.
    states = [episode.states[: len(episode.rewards)] for episode in episodes]
    columns = {
        "response_ids": ids,
        "rollout_logprobs": tokens([episode.logprobs for episode in episodes], torch.float32),
        "loss_mask": tokens(masks, torch.uint8),
        "weight_version": tokens([episode.versions for episode in episodes], torch.int32),
        "finish_reason": [episode.reason for episode in episodes],
        "turn": turns,
        "episode_return": returns,
        "turn_rewards": [episode.rewards for episode in episodes],
        "turn_states": states,
    }

    count = float(len(episodes))
    taken = float(sum(len(episode.rewards) for episode in episodes))
    figures = {"turns": (taken, count), "episode_return": (float(returns.sum()), count)}
    return Batch(columns, Metrics(figures))
