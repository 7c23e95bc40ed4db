"""Environments: what answers the model in several turns, one object per episode."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import attrs
import numpy as np


@attrs.frozen
class Start:
    """What an episode begins with."""

    prompt: str
    """Text of the prompt, special tokens removed."""
    meta: Mapping[str, Any]
    """The fields of the data's row; `answer` is what is expected."""
    seed: int
    """Of this sequence: for environments with chance in them."""


@attrs.frozen(eq=False)
class Turn:
    """What the model said."""

    number: int
    """From 0."""
    text: str
    """Special tokens removed; a stop of the environment is part of it."""
    ids: np.ndarray
    """int64 [T], special tokens included."""
    ended: bool
    """Whether it ended with the end of text (or one of sampling.stop_tokens), not with one of the environment's stops."""


@attrs.frozen
class Answer:
    """What the environment says to a turn, and before the first one."""

    text: str = ""
    """Put after the turn as it is, tokenised by itself; its tokens are not trained on."""
    reward: float = 0.0
    """Of the turn."""
    done: bool = False
    """The episode ends here; `text` is then left out."""
    state: str = ""
    """Names the state in which the next turn is taken: equal names are equal states (column `turn_states`)."""


class Environment(ABC):
    """Plugin contract. `__init__` takes the options of the configuration as keyword arguments."""

    stops: ClassVar[tuple[str, ...]] = ()
    """Texts, of one token each, that end a turn beside the end of text."""

    def reset(self, start: Start) -> Answer:
        """Begin an episode; its text stands before the first turn."""
        return Answer()

    @abstractmethod
    def step(self, turn: Turn) -> Answer:
        """Answer a turn. Without `done` the answer has a text, which does not end with a stop."""

    def close(self) -> None:  # noqa: B027
        """Give back what the episode held. Called once, at its end, however it ended."""
