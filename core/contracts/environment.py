"""The contract of environments, which answer the model over several turns, one object per episode.

reset(Start) -> Answer          its text comes before the first turn
step(Turn)   -> Answer          again and again, until an answer is `done`
close()

Texts are tokenised by the runner. An environment may answer in tokens itself, from the prompt on:
for agents that ask the model by themselves (backends/agents/).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np

from hybridflow.core.contracts.tokenizer import Tokenizer


@attrs.frozen
class Start:
    """The beginning of an episode: its prompt, the row's fields, and a seed."""

    prompt: str
    """Text of the prompt, special tokens removed."""
    meta: Mapping[str, Any]
    """The fields of the data's row; `answer` is the expected answer."""
    seed: int
    """Seed of this sequence, for environments that draw random numbers."""
    tokenizer: Tokenizer | None = attrs.field(default=None, eq=False)
    """The policy's tokenizer, for environments that answer in tokens; a run always gives it."""


@attrs.frozen(eq=False)
class Turn:
    """One turn of the model."""

    number: int
    """Number of the turn, from 0."""
    text: str
    """Text, special tokens removed; a stop of the environment is part of it."""
    ids: np.ndarray
    """Tokens, int64 [T], special ones included."""
    ended: bool
    """Whether it ended with the end of text (or one of sampling.stop_tokens), not with one of the
    environment's stops."""
    cut: bool = False
    """Whether it has as many tokens as Answer.max_tokens allowed, and did not end."""
    logprobs: np.ndarray | None = None
    """Log-probabilities of its tokens, float32 [T], as Completion has them; a run always gives
    them."""


@attrs.frozen
class Answer:
    """The environment's answer to a turn, or its opening before the first one."""

    # For the model
    text: str = ""
    """Text put unchanged after the turn, tokenised by itself; its tokens are not trained on."""

    # For the trainer
    reward: float = 0.0
    """Reward of the turn."""
    done: bool = False
    """Whether the episode ends here; `text` is then left out."""
    state: str = ""
    """Name of the state in which the next turn is taken: equal names are equal states (column
    `turn_states`)."""

    # In front of agents that ask by themselves
    ids: tuple[int, ...] = ()
    """Tokens for the model, in the place of a text."""
    max_tokens: int | None = None
    """Limit of the turn that follows, in tokens, below the row's own; None sets none."""
    after: int | None = None
    """Index of the row's token after which the next turn goes on, behind `ids`, where it begins a
    branch; -1: after the prompt; -2: `ids` begin a conversation of their own. None: the last
    token."""
    keep: int | None = None
    """Number of tokens of the turn that stay in the row, at least one; None: all. The others are
    left out as if they had not been made, for stops that are no single token."""


class Environment(ABC):
    """The plugin contract. `__init__` takes the configured options as keyword arguments.

    It starts nothing: one is made when a config is read, only to see whether the options fit. Where
    they do not, raise ConfigError.
    """

    stops: tuple[str, ...] = ()
    """Texts, of one token each, that end a turn beside the end of text."""
    own_prompt: bool = False
    """Whether the answer of `reset`, then not empty, takes the place of the row's prompt."""

    def check(self, tokenizer: Tokenizer) -> None:  # noqa: B027
        """Raise ConfigError where the environment cannot work with the policy's tokenizer.

        Called before a run starts anything.
        """

    def reset(self, start: Start) -> Answer:
        """Begin an episode; the answer's text stands before the first turn.

        Like `step` it may be `async`. Both are called in threads, one call at a time, beside those
        of other episodes' environments. An episode that begins again has a new environment and the
        same `start`.
        """
        return Answer()

    @abstractmethod
    def step(self, turn: Turn) -> Answer:
        """Return the answer to a turn of the model.

        Unless it is `done`, it must not be empty, nor end with one of the stops.
        """

    def close(self) -> None:  # noqa: B027
        """Release the episode's resources; it may be `async`.

        Called once at the episode's end, also after a failure, and while a call that took too long
        still runs.
        """
