"""Episodes: turns of the model and answers of an environment, by rounds of requests that go on after their prefix.

Tokens in, tokens out: what the model made is never tokenised again, and an answer is tokenised by itself.
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
from hybridflow.core.job.schema import EnvironmentSection
from hybridflow.core.plugins.resolve import environment_class
from hybridflow.core.values.batch import Batch
from hybridflow.core.values.columns import tokens
from hybridflow.core.values.metrics import Metrics
from hybridflow.core.values.text import shorten

log = logging.getLogger(__name__)
NOT_MADE = -1
"""The turn, and the weight version, of tokens that the environment wrote."""


@attrs.frozen
class Episodes:
    """What a worker must know to drive them."""

    section: EnvironmentSection
    tokenizer: Tokenizer

    def stop_ids(self) -> tuple[int, ...]:
        """The environment's stops. Raises ConfigError for one that is not one token."""
        section, found = self.section, []
        for text in environment_class(section.name, section.options).stops:
            ids = self.tokenizer.encode(text)
            if len(ids) != 1:
                raise ConfigError(
                    f"environment {section.name!r} ends turns with {text!r}, which is {len(ids)} tokens of this tokenizer; "
                    "choose a stop of one token, or another tokenizer"
                )
            found.append(int(ids[0]))
        return tuple(found)


class Episode:
    """One row: what was said so far, with the mask, logprobs, versions and turn of each token."""

    def __init__(
        self, spec: Episodes, request: Request, meta: Mapping[str, Any], stops: tuple[int, ...]
    ):
        self.spec, self.request, self.meta, self.stops = spec, request, meta, stops
        self.ids = np.zeros(0, np.int64)
        self.logprobs = np.zeros(0, np.float32)
        self.versions, self.turns = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self.rewards: list[float] = []
        self.states: list[str] = []
        self.reason: str | None = None
        self.environment: Environment | None = None

    def start(self) -> dict[str, Any]:
        """Reset the environment; its answer, for `take`."""
        prompt = self.spec.tokenizer.decode(self.request.prompt_ids)

        def begin() -> Answer:
            section = self.spec.section
            self.environment = environment_class(section.name, section.options)(**section.options)
            return self.environment.reset(Start(prompt, self.meta, self.request.seed))

        return self._said(begin, prompt)

    def answer(self, turn: Turn) -> dict[str, Any]:
        assert self.environment is not None
        step = self.environment.step
        return self._said(lambda: step(turn), turn.text)

    def close(self) -> None:
        """Whatever it does, the others are closed too."""
        try:
            if self.environment is not None:
                self.environment.close()
        except Exception:
            log.exception("environment %r could not be closed", self.spec.section.name)

    def _said(self, call: Any, text: str) -> dict[str, Any]:
        """The answer as plain values, which travel; a failure as its message."""
        name = self.spec.section.name
        try:
            answer = call()
        except Exception as error:
            return {
                "error": f"environment {name!r} raised {type(error).__name__}: {error} [after {shorten(text)}]"
            }
        if not isinstance(answer, Answer):
            return {
                "error": f"environment {name!r} returned {answer!r:.80}; return an Answer [after {shorten(text)}]"
            }
        if not isinstance(answer.reward, (int, float)) or not np.isfinite(answer.reward):
            wrong = f"gave the reward {answer.reward!r}; it must be a finite number"
            return {"error": f"environment {name!r} {wrong} [after {shorten(text)}]"}
        return attrs.asdict(answer)

    def take(self, said: Mapping[str, Any], first: bool = False) -> None:
        """The environment's answer. Raises EnvironmentFailure."""
        if "error" in said:
            raise EnvironmentFailure(f"{said['error']} [row {self.request.id}]")
        if not first:
            self.rewards.append(float(said["reward"]))
        if said["done"]:
            self.reason = "stop"
            return
        ids = self.spec.tokenizer.encode(said["text"]) if said["text"] else np.zeros(0, np.int64)
        if (not first and not len(ids)) or (
            len(ids) and int(ids[-1]) in self.request.sampling.stop_token_ids
        ):
            raise EnvironmentFailure(
                f"environment {self.spec.section.name!r} answered {said['text']!r} and the episode is not done; an answer "
                f"needs a text that does not end as a turn does [row {self.request.id}]"
            )
        room = self.request.sampling.max_tokens - len(self.ids)
        self._put(
            ids[:room],
            np.zeros(len(ids[:room]), np.float32),
            np.full(len(ids[:room]), NOT_MADE),
            NOT_MADE,
        )
        if len(ids) >= room or len(self.rewards) >= self.spec.section.max_turns:
            self.reason = "length"
        self.states.append(said["state"])

    def next_request(self) -> Request:
        return attrs.evolve(
            self.request,
            prefix_ids=self.ids,
            prefix_logprobs=self.logprobs,
            prefix_versions=self.versions,
        )

    def made(self, done: Completion) -> Turn | None:
        """Take a turn; None where the episode ends with it."""
        had = len(self.ids)
        new = done.response_ids[had:]
        self._put(new, done.logprobs[had:], done.weight_version[had:], len(self.rewards))
        if done.finish_reason != "stop":
            self.reason = done.finish_reason
            self.rewards.append(0.0)
            return None
        text = self.spec.tokenizer.decode(new)
        return Turn(len(self.rewards), text, new, not (len(new) and int(new[-1]) in self.stops))

    def _put(self, ids: np.ndarray, logprobs: np.ndarray, versions: np.ndarray, turn: int) -> None:
        self.ids = np.concatenate([self.ids, ids])
        self.logprobs = np.concatenate([self.logprobs, logprobs.astype(np.float32)])
        self.versions = np.concatenate([self.versions, versions])
        self.turns = np.concatenate([self.turns, np.full(len(ids), turn)])


def run_episodes(
    engine: RolloutEngine, requests: Sequence[Request], metas: Sequence[Mapping[str, Any]], spec: Episodes,
    context: RankContext,
) -> Batch:  # fmt: skip
    """Columns of `generate`, and per token `turn` (-1 of the environment's), per row `episode_return`, and as lists
    `turn_rewards` and `turn_states` (the state in which each turn was taken).

    The environment runs on the first rank of a replica, whose answers the others get. Raises EnvironmentFailure.
    """
    stops = spec.stop_ids()
    episodes = []
    for request, meta in zip(requests, metas, strict=True):
        sampling = attrs.evolve(
            request.sampling, stop_token_ids=(*request.sampling.stop_token_ids, *stops)
        )
        episodes.append(Episode(spec, attrs.evolve(request, sampling=sampling), meta, stops))
    try:
        answers = _on_first_rank(lambda: [e.start() for e in episodes], context)
        for episode, answer in zip(episodes, answers, strict=True):
            episode.take(answer, first=True)
        while running := [e for e in episodes if e.reason is None]:
            done = engine.generate([e.next_request() for e in running])
            turns = [(e, e.made(completion)) for e, completion in zip(running, done, strict=True)]
            waiting = [(e, turn) for e, turn in turns if turn is not None]
            said = _on_first_rank(
                lambda waiting=waiting: [e.answer(turn) for e, turn in waiting], context
            )
            for (episode, _), answer in zip(waiting, said, strict=True):
                episode.take(answer)
    finally:
        for episode in episodes:
            episode.close()
    return _batch(episodes)


def _on_first_rank(work: Any, context: RankContext) -> list[Any]:
    """Its result on every rank of the replica; what it raises too, so that none waits for ever."""
    group = context.group("generation.tp")
    if group is None:
        return work()
    found: list[Any] = [None]
    first = dist.get_global_rank(group, 0)
    if dist.get_rank() == first:
        try:
            found = [(True, work())]
        except Exception as error:
            found = [(False, f"{type(error).__name__}: {error}")]
    dist.broadcast_object_list(found, src=first, group=group)
    good, made = found[0]
    if not good:
        raise EnvironmentFailure(made)
    return made


def _batch(episodes: Sequence[Episode]) -> Batch:
    ids = tokens([e.ids for e in episodes], torch.int64)
    turns = tokens([e.turns for e in episodes], torch.int32)
    returns = torch.tensor([sum(e.rewards) for e in episodes], dtype=torch.float32)
    taken = [len(e.rewards) for e in episodes]
    columns = {
        "response_ids": ids,
        "rollout_logprobs": tokens([e.logprobs for e in episodes], torch.float32),
        "loss_mask": tokens([e.turns != NOT_MADE for e in episodes], torch.uint8),
        "weight_version": tokens([e.versions for e in episodes], torch.int32),
        "finish_reason": [e.reason for e in episodes],
        "turn": turns,
        "episode_return": returns,
        "turn_rewards": [e.rewards for e in episodes],
        "turn_states": [e.states[:n] for e, n in zip(episodes, taken, strict=True)],
    }
    count = float(len(episodes))
    figures = {"turns": (float(sum(taken)), count), "episode_return": (float(returns.sum()), count)}
    return Batch(columns, Metrics(figures))
