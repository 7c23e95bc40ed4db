"""Episodes: turns of the model and answers of an environment.

    prompt -> reset -> [answer] -> turn -> step -> [answer] -> turn -> ... -> done, or no room left

Each round of turns is one call of the engine, with a request per running episode, whose prefix is
the text so far. The model's tokens are never decoded and tokenised again, and an answer is
tokenised separately.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch
import torch.distributed as dist

from hybridflow.core.contracts.environment import Answer, Environment, Start, Turn
from hybridflow.core.contracts.rollout import Completion, Request, RolloutEngine
from hybridflow.core.contracts.tokenizer import Tokenizer
from hybridflow.core.contracts.worker import RankContext
from hybridflow.core.errors import ConfigError, EnvironmentFailure
from hybridflow.core.job.sections import EnvironmentSection
from hybridflow.core.plugins.resolve import environment_class
from hybridflow.core.values.batch import Batch
from hybridflow.core.values.columns import tokens
from hybridflow.core.values.metrics import Metrics
from hybridflow.core.values.text import shorten

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
        self.environment: Environment | None = None

    def start(self) -> dict[str, Any]:
        """Reset the environment; return its answer, for `take`."""
        prompt = self.spec.tokenizer.decode(self.request.prompt_ids)

        def begin() -> Answer:
            section = self.spec.section
            self.environment = environment_class(section.name, section.options)(**section.options)
            return self.environment.reset(Start(prompt, self.meta, self.request.seed))

        return self._plain_answer(begin, prompt)

    def answer(self, turn: Turn) -> dict[str, Any]:
        """Pass the model's turn to the environment; return its answer, for `take`."""
        assert self.environment is not None
        step = self.environment.step
        return self._plain_answer(lambda: step(turn), turn.text)

    def close(self) -> None:
        """Close the environment. An error is logged, so that the other ones are closed too."""
        try:
            if self.environment is not None:
                self.environment.close()
        except Exception:
            log.exception("environment %r could not be closed", self.spec.section.name)

    def _plain_answer(self, call: Any, text: str) -> dict[str, Any]:
        """Return the answer as plain values, to be sent; a failure as {"error": its message}."""
        try:
            answer = call()
        except Exception as error:
            problem = f"raised {type(error).__name__}: {error}"
        else:
            if not isinstance(answer, Answer):
                problem = f"returned {answer!r:.80}; return an Answer"
            elif not isinstance(answer.reward, (int, float)) or not np.isfinite(answer.reward):
                problem = f"gave the reward {answer.reward!r}; it must be a finite number"
            else:
                return attrs.asdict(answer)

        # Every rank of the replica raises it, in `take`.
        name = self.spec.section.name
        return {"error": f"environment {name!r} {problem} [after {shorten(text)}]"}

    def take(self, said: Mapping[str, Any], first: bool = False) -> None:
        """Append the environment's answer to the episode.

        first: the answer to `start`, which may be empty and has no reward. Raises
        EnvironmentFailure when the environment failed, or when no turn can follow its text.
        """
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


def run_episodes(
    engine: RolloutEngine,
    requests: Sequence[Request],
    metas: Sequence[Mapping[str, Any]],
    spec: Episodes,
    context: RankContext,
) -> Batch:
    """Run an episode for each request; return the columns of `generate`, and further ones.

    Per token `turn` (-1 where the environment wrote), per row `episode_return`, and as lists
    `turn_rewards` and `turn_states` (the state in which each turn was taken). The environments
    run on the first rank of a replica, and the other ranks get their answers. Raises
    EnvironmentFailure.
    """
    # Generation ends at the environment's stops too.
    stops = spec.stop_ids()
    episodes = []
    for request, meta in zip(requests, metas, strict=True):
        stop_token_ids = (*request.sampling.stop_token_ids, *stops)
        sampling = attrs.evolve(request.sampling, stop_token_ids=stop_token_ids)
        episodes.append(Episode(spec, attrs.evolve(request, sampling=sampling), meta, stops))

    try:
        starts = _on_first_rank(lambda: [episode.start() for episode in episodes], context)
        for episode, answer in zip(episodes, starts, strict=True):
            episode.take(answer, first=True)

        # A round: a turn of each running episode, then the answers to those that go on.
        while running := [episode for episode in episodes if episode.reason is None]:
            done = engine.generate([episode.next_request() for episode in running])
            waiting = []
            for episode, completion in zip(running, done, strict=True):
                turn = episode.made(completion)
                if turn is not None:
                    waiting.append((episode, turn))

            answers = _on_first_rank(
                lambda waiting=waiting: [episode.answer(turn) for episode, turn in waiting], context
            )
            for (episode, _), answer in zip(waiting, answers, strict=True):
                episode.take(answer)
    finally:
        for episode in episodes:
            episode.close()
    return _batch(episodes)


def _on_first_rank(work: Any, context: RankContext) -> list[Any]:
    """Run `work` on the first rank of the replica, and return its result on every rank.

    An error becomes an EnvironmentFailure on every rank, so that none waits for ever.
    """
    group = context.group("generation.replica")
    if group is None:
        return work()

    # An outcome, so that a failure does not leave the other ranks waiting.
    message: list[Any] = [None]
    first = dist.get_global_rank(group, 0)
    if dist.get_rank() == first:
        try:
            message = [(True, work())]
        except Exception as error:
            message = [(False, f"{type(error).__name__}: {error}")]
    dist.broadcast_object_list(message, src=first, group=group)

    succeeded, result = message[0]
    if not succeeded:
        raise EnvironmentFailure(result)
    return result


def _batch(episodes: Sequence[Episode]) -> Batch:
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
