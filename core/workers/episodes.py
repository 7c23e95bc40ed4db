"""Episodes: turns of the model and answers of an environment.

    prompt -> reset -> [answer] -> turn -> step -> [answer] -> turn -> ... -> done, or no room left

Each turn is a request that goes on after what was written so far. Tokens in, tokens out: what the
model wrote is never tokenised again, and an answer is tokenised by itself. episode_runner.py plays
the episodes of a batch.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import numpy as np
import torch

from hybridflow.core.contracts.environment import Answer, Environment, Start, Turn
from hybridflow.core.contracts.rollout import Completion, Request
from hybridflow.core.contracts.tokenizer import Tokenizer
from hybridflow.core.errors import ConfigError, EnvironmentFailure
from hybridflow.core.job.sections import EnvironmentSection
from hybridflow.core.plugins.resolve import make_environment
from hybridflow.core.values.batch import Batch
from hybridflow.core.values.branches import AFTER_PROMPT, ALONE, BRANCHES, Place
from hybridflow.core.values.columns import tokens
from hybridflow.core.values.metrics import Metrics
from hybridflow.core.values.outcomes import (
    COMPLETE,
    EPISODE_OUTCOMES,
    FAILED_ENVIRONMENT,
    FAILED_TOOL,
    TRUNCATED_TIME,
    TRUNCATED_TOKENS,
    TRUNCATED_TURNS,
    failed_rows,
    finish_reason,
    finished,
)
from hybridflow.core.values.seeds import row_seed
from hybridflow.core.values.text import shorten
from hybridflow.core.workers.environment_calls import Answered

log = logging.getLogger(__name__)
NOTHING = np.zeros(0, np.int64)
NOT_MADE = -1
"""The value for tokens of the environment in the columns turn and weight_version."""
LONGEST_TOKEN = 256
"""More characters than any token stands for, by which an answer without end is cut."""


@attrs.frozen
class Episodes:
    """The environment and the tokenizer by which a worker runs episodes."""

    section: EnvironmentSection
    """The environment's name, options and limits."""
    tokenizer: Tokenizer
    """The policy's tokenizer."""
    longest_prompt: int = 0
    """Limit of a prompt of the environment's own, in tokens; 0 sets none."""

    def check(self) -> None:
        """Raise ConfigError where environment and tokenizer do not go together."""
        make_environment(self.section.name, self.section.options).check(self.tokenizer)
        self.stop_ids()

    def stop_ids(self) -> tuple[int, ...]:
        """Return the tokens that end a turn. Raises ConfigError for a stop of several tokens."""
        section = self.section
        stops = []  # engines compare single tokens
        for text in make_environment(section.name, section.options).stops:
            ids = self.tokenizer.encode(text)
            if len(ids) != 1:
                raise ConfigError(
                    f"environment {section.name!r} ends turns with {text!r}, which is {len(ids)} "
                    "tokens of this tokenizer; choose a stop of one token, or another tokenizer"
                )
            stops.append(int(ids[0]))
        return tuple(stops)


class Attempt:
    """One try of an episode: its environment, which is made, asked and closed in threads."""

    def __init__(self, section: EnvironmentSection):
        self.section = section
        self.environment: Environment | None = None
        self._ended = False
        self._lock = threading.Lock()

    def begin(self, start: Start) -> Any:
        """Make the environment, and return its answer to the prompt, or a coroutine of it."""
        section = self.section
        environment = make_environment(section.name, section.options)
        with self._lock:
            ended = self._ended
            if not ended:
                self.environment = environment
        # Given up while it was made.
        if ended:
            return environment.close()
        return environment.reset(start)

    def retire(self) -> Callable[[], Any] | None:
        """Return how to close the environment; None where there is nothing to close.

        One that is still being made closes itself.
        """
        with self._lock:
            self._ended = True
            environment, self.environment = self.environment, None
        if environment is None or type(environment).close is Environment.close:
            return None
        return environment.close


class Episode:
    """One row: the tokens so far, with mask, logprob, weight version and turn of each."""

    def __init__(
        self, spec: Episodes, request: Request, meta: Mapping[str, Any], stops: tuple[int, ...]
    ):
        """Take the first turn's request, the row's fields, and the tokens that end a turn."""
        self.spec = spec
        self.drawn = request
        """The request of the row's own prompt."""
        self.meta = meta
        self.stops = stops
        self.tries = 0
        """Number of tries that have failed."""
        self._begin_again()

    def _begin_again(self) -> None:
        self.request = self.drawn
        self.limit: int | None = None
        """Limit of the next turn alone, in tokens."""
        # For each token so far, the model's and the environment's.
        self.ids = np.zeros(0, np.int64)
        self.logprobs = np.zeros(0, np.float32)
        self.versions = np.zeros(0, np.int64)
        self.turns = np.zeros(0, np.int64)
        self.own_prompt = False
        """Whether the environment has given the prompt."""
        self.place = Place()

        # For each turn so far; `outcome` is None while the episode runs.
        self.rewards: list[float] = []
        self.states: list[str] = []
        self.outcome: str | None = None
        self.begun = False
        """Whether the environment's first answer has come."""
        self.turn: Turn | None = None
        """The model's last turn."""

        # On the rank that asks the environments
        self.attempt = Attempt(self.spec.section)
        self.deadline = math.inf
        """When the time of the episode is over, by time.monotonic."""
        self.asked = ""
        """The text that the environment was given last."""

    def next_call(self) -> Callable[[], Any]:
        """Return the next call of the environment; the first one makes it.

        Its result is an answer, or a coroutine of one.
        """
        if self.turn is not None:
            assert self.attempt.environment is not None
            self.asked = self.turn.text
            return partial(self.attempt.environment.step, self.turn)

        limit = self.spec.section.episode_s
        self.deadline = math.inf if limit is None else time.monotonic() + limit
        return partial(self._begin, self.attempt)

    def _begin(self, attempt: Attempt) -> Any:
        self.asked = self.spec.tokenizer.decode(self.request.prompt_ids)
        start = Start(self.asked, self.meta, self.request.seed, self.spec.tokenizer)
        return attempt.begin(start)

    def said(self, answered: Answered) -> dict[str, Any]:
        """Return an answer as plain values, which travel.

        With `over` where the episode's time is; a failure as its outcome (`failed`) and a message
        (`error`).
        """
        section = self.spec.section
        over = time.monotonic() >= self.deadline
        if answered.late and over:
            return {
                "ids": NOTHING,
                "prompts": False,
                "reward": 0.0,
                "done": False,
                "state": "",
                "over": True,
                "limit": None,
                "keep": None,
                "after": None,
            }

        kind = FAILED_TOOL if self.begun else FAILED_ENVIRONMENT
        if answered.late:
            problem = f"took longer than environment.timeout_s = {section.timeout_s:g} s"
        elif (error := answered.error) is not None:
            problem = f"raised {type(error).__name__}: {error}"
        else:
            answer = answered.value
            kind = FAILED_ENVIRONMENT
            problem = _contract_problem(answer, self.turn, self.spec.tokenizer)
            if not problem and answer.after is not None:
                problem = self._branch_problem(answer, answer.after)

        prompts = not self.begun and getattr(self.attempt.environment, "own_prompt", False)
        if not problem:
            ids = NOTHING if answer.done else self._encode(answer)
            if not answer.done:
                problem = self._prompt_problem(ids) if prompts else self._ids_problem(answer, ids)
        if problem:
            message = (
                f"environment {section.name!r} {problem} "
                f"[after {shorten(self.asked)}] [row {self.request.id}]"
            )
            return {"failed": kind, "error": message}
        return {
            "ids": ids,
            "prompts": prompts,
            "reward": float(answer.reward),
            "done": answer.done,
            "state": answer.state,
            "over": over,
            "limit": answer.max_tokens,
            "keep": answer.keep,
            "after": answer.after,
        }

    def _encode(self, answer: Answer) -> np.ndarray:
        """Return an answer's tokens, int64 [T], of a very long text at least `max_tokens`."""
        if not answer.text:
            return np.array(answer.ids, np.int64)
        longest = LONGEST_TOKEN * max(self.request.sampling.max_tokens, self.spec.longest_prompt)
        return self.spec.tokenizer.encode(answer.text[:longest])

    def _branch_problem(self, answer: Answer, after: int) -> str:
        """Return why the conversation cannot go on after a token; empty if it can."""
        length = self._length_with(answer.keep)
        first = ALONE if answer.ids else AFTER_PROMPT
        if self.begun and first <= after < length:
            return ""
        return (
            f"gave after = {after}, and the row has {length} tokens; give the index of one, "
            "-1 (the prompt), or -2 with ids of a conversation of its own"
        )

    def _ids_problem(self, answer: Answer, ids: np.ndarray) -> str:
        """Return why the model cannot go on after these tokens of an answer; empty if it can."""
        # An engine would treat a prefix that ends in a stop as a complete turn.
        missing = self.begun and not len(ids) and answer.after is None
        last = ids[-1:]
        if not len(ids) and answer.after is not None and answer.after >= 0:
            last = self.ids[answer.after : answer.after + 1]
        ends = len(last) and int(last[0]) in self.request.sampling.stop_token_ids
        if not missing and not ends:
            return ""
        said = shorten(answer.text or self.spec.tokenizer.decode(ids))
        return (
            f"answered {said} and the episode is not done; an answer needs a text that does not "
            "end as a turn does"
        )

    def _prompt_problem(self, ids: np.ndarray) -> str:
        """Return why these tokens cannot be the prompt; empty if they can."""
        limit = self.spec.longest_prompt
        if not len(ids):
            return "gave no prompt, and has one of its own (own_prompt)"
        if limit and len(ids) > limit:
            return f"gave a prompt of {len(ids)} tokens; data.max_prompt_tokens is {limit}"
        return ""

    def take(self, said: Mapping[str, Any]) -> None:
        """Append the environment's answer to the episode.

        The first one may be empty and has no reward. After a failure the episode begins again, or
        ends, by the rule of the environment. Raises EnvironmentFailure where that ends the run.
        """
        if "failed" in said:
            self._failed(said["failed"], said["error"])
            return
        first = not self.begun
        self.begun = True
        # The answer to a turn has the turn's reward.
        if not first:
            self._keep(said["keep"])
            self.rewards.append(said["reward"])
        if said["done"]:
            self.outcome = COMPLETE
            return

        self.limit = said["limit"]
        ids = said["ids"]
        if said["prompts"]:
            self.own_prompt = True
            self.request = attrs.evolve(self.request, prompt_ids=ids)
            ids = NOTHING
        # Cut off what exceeds the row's limit, which counts the environment's tokens too.
        room = self.request.sampling.max_tokens - len(self.ids)
        taken = ids[:room]
        self.place.move(len(self.ids), len(taken), said["after"])
        logprobs = np.zeros(len(taken), np.float32)
        versions = np.full(len(taken), NOT_MADE)
        self._put(taken, logprobs, versions, NOT_MADE)
        # The row's limit is reached, or the number of turns, or the time.
        if len(ids) >= room:
            self.outcome = TRUNCATED_TOKENS
        elif len(self.rewards) >= self.spec.section.max_turns:
            self.outcome = TRUNCATED_TURNS
        elif said["over"]:
            self.outcome = TRUNCATED_TIME
        self.states.append(said["state"])

    def _failed(self, outcome: str, error: str) -> None:
        rule = self.spec.section.on_failure
        left = rule.retries - self.tries
        self.tries += 1
        if left > 0:
            log.warning("%s; the episode begins again (%d left)", error, left)
            self._begin_again()
        elif rule.mask:
            log.warning("%s; the episode is left out", error)
            self.outcome = outcome
        else:
            raise EnvironmentFailure(error)

    def next_request(self) -> Request:
        """Return the request for the model's next turn, whose prefix is what stands before it."""
        prompt, context = self.place.split(self.request.prompt_ids, self.ids)
        room = self.request.sampling.max_tokens - len(self.ids)
        if self.limit is not None:
            room = min(room, self.limit)
        sampling = attrs.evolve(self.request.sampling, max_tokens=len(context) + room)
        # The same tokens would be drawn after the same ones.
        seed = self.request.seed
        if self.place.branches:
            seed = row_seed(seed, len(self.place.branches))
        return attrs.evolve(
            self.request,
            prompt_ids=prompt,
            sampling=sampling,
            seed=seed,
            prefix_ids=self.ids[context],
            prefix_logprobs=self.logprobs[context],
            prefix_versions=self.versions[context],
        )

    def made(self, done: Completion) -> bool:
        """Append the model's turn to the episode; return whether the environment answers it."""
        start = len(self.ids)
        whole = self.request.sampling.max_tokens
        prefix = len(self.place.context) - 1  # the prompt, or what stands in its place
        new = done.response_ids[prefix:]
        versions = done.weight_version[prefix:]
        self._put(new, done.logprobs[prefix:], versions, len(self.rewards))

        # Cut off by the row's length, or aborted: the environment does not see the turn.
        cut = done.finish_reason == "length" and len(self.ids) < whole
        if done.finish_reason != "stop" and not cut:
            self.outcome = finished(done.finish_reason)
            self.rewards.append(0.0)
            return False

        # A stop of the request itself ends a turn too, and is no stop of the environment.
        text = self.spec.tokenizer.decode(new)
        stopped = len(new) and int(new[-1]) in self.stops
        logprobs = self.logprobs[start:]
        ended = not stopped and not cut
        self.turn = Turn(len(self.rewards), text, new, ended, cut, logprobs)
        return True

    def _length_with(self, keep: int | None) -> int:
        """Return the number of tokens once the last turn has its first `keep` ones alone."""
        if keep is None or self.turn is None:
            return len(self.ids)
        return len(self.ids) - len(self.turn.ids) + keep

    def _keep(self, count: int | None) -> None:
        """Leave out what the last turn has after its first `count` tokens."""
        end = self._length_with(count)
        self.ids, self.logprobs = self.ids[:end], self.logprobs[:end]
        self.versions, self.turns = self.versions[:end], self.turns[:end]

    def _put(self, ids: np.ndarray, logprobs: np.ndarray, versions: np.ndarray, turn: int) -> None:
        self.ids = np.concatenate([self.ids, ids])
        self.logprobs = np.concatenate([self.logprobs, logprobs.astype(np.float32)])
        self.versions = np.concatenate([self.versions, versions])
        self.turns = np.concatenate([self.turns, np.full(len(ids), turn)])


def _contract_problem(answer: Any, turn: Turn | None, tokenizer: Tokenizer) -> str:
    """Return what an environment returned instead of an answer, in words; empty for an answer."""
    if not isinstance(answer, Answer):
        return f"returned {answer!r:.80}; return an Answer"
    if not isinstance(answer.reward, (int, float)) or not np.isfinite(answer.reward):
        return f"gave the reward {answer.reward!r}; it must be a finite number"
    if not isinstance(answer.text, str):
        return f"answered {answer.text!r:.80}; the text of an Answer is a str"
    if answer.text and answer.ids:
        return "answered with a text and with ids; give one of them"
    if wrong := [token for token in answer.ids if not 0 <= token < tokenizer.vocab_size]:
        last = tokenizer.vocab_size - 1
        return f"answered with the token {wrong[0]!r}; the tokenizer has 0 to {last}"
    if answer.max_tokens is not None and answer.max_tokens < 1:
        return f"gave max_tokens = {answer.max_tokens!r}; give at least 1, or None"
    if answer.keep is not None and (turn is None or not 1 <= answer.keep <= len(turn.ids)):
        made = "no turn was made" if turn is None else f"the turn has {len(turn.ids)} tokens"
        return f"gave keep = {answer.keep!r}; {made}: give 1 or more of them, or None"
    return ""


def episode_batch(episodes: Sequence[Episode]) -> Batch:
    """Return the columns of ended episodes.

    Metrics are the shares of their outcomes, and the mean return and number of turns of those that
    did not fail.
    """
    ids = tokens([episode.ids for episode in episodes], torch.int64)
    turns = tokens([episode.turns for episode in episodes], torch.int32)
    outcomes = [str(episode.outcome) for episode in episodes]
    lost = failed_rows(outcomes)

    # Of a failed episode nothing counts.
    returns = torch.tensor([sum(episode.rewards) for episode in episodes], dtype=torch.float32)
    returns[torch.from_numpy(lost)] = math.nan
    masks = [episode.turns != NOT_MADE for episode in episodes]
    for row in np.flatnonzero(lost):
        masks[row][:] = False

    # No turn is taken in the state after the last turn, so it is left out.
    states = [episode.states[: len(episode.rewards)] for episode in episodes]
    # One that has got no token is none.
    branches = [
        [list(one) for one in episode.place.branches if one[0] < len(episode.ids)]
        for episode in episodes
    ]
    columns = {
        "response_ids": ids,
        "rollout_logprobs": tokens([episode.logprobs for episode in episodes], torch.float32),
        "loss_mask": tokens(masks, torch.uint8),
        "weight_version": tokens([episode.versions for episode in episodes], torch.int32),
        "finish_reason": [finish_reason(outcome) for outcome in outcomes],
        "outcome": outcomes,
        "turn": turns,
        "episode_return": returns,
        "turn_rewards": [episode.rewards for episode in episodes],
        "turn_states": states,
        BRANCHES: branches,
        "prompt_ids": tokens([episode.request.prompt_ids for episode in episodes], torch.int64),
    }

    count = float(len(episodes))
    figures = {name: (float(outcomes.count(name)), count) for name in EPISODE_OUTCOMES}
    kept = np.flatnonzero(~lost)
    taken = float(sum(len(episodes[row].rewards) for row in kept.tolist()))
    earned = float(returns[torch.from_numpy(kept)].sum())
    figures |= {"turns": (taken, float(len(kept))), "episode_return": (earned, float(len(kept)))}
    # On every rank or on none, of an agent's kind: their means are put together.
    if any(episode.own_prompt for episode in episodes):
        figures["branches"] = (float(sum(map(len, branches))), count)
    return Batch(columns, Metrics(figures))
