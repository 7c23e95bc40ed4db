"""Rewards: from generated responses to one number each, with errors that name the row."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from hybridflow.core.errors import RewardError
from hybridflow.core.validators import at_least, non_negative, positive


@attrs.frozen(eq=False)
class RewardSample:
    """What a reward sees of one response."""

    prompt: str
    """Text of the prompt, special tokens removed."""
    response: str
    """Text of the response, special tokens removed."""
    response_ids: np.ndarray
    """int64 [T], special tokens included."""
    meta: Mapping[str, Any]
    """The fields of the data's row; `answer` is what is expected."""
    finish_reason: str = "stop"
    """ "stop", "length" (cut at the limit) or "abort"."""
    episode_return: float | None = None
    """Sum of the rewards that an environment gave."""
    written: np.ndarray | None = None
    """bool [T]: tokens that the model wrote, not an environment; None: all."""

    @property
    def answer(self) -> str:
        """The expected answer, as text. Raises RewardError for a row without one."""
        answer = self.meta.get("answer")
        if answer is None:
            raise RewardError(
                f"the row has no answer to compare with (its fields are {', '.join(map(str, self.meta)) or 'none'}); "
                'set data.answer, for example data.answer = "{solution}"'
            )
        return str(answer)


class Reward(ABC):
    """Plugin contract. `__init__` takes the options of the configuration as keyword arguments."""

    @abstractmethod
    def __call__(self, samples: Sequence[RewardSample]) -> Sequence[Any]:
        """One finite number per sample, in their order; higher is better. Where the config says per_token, a list of one
        number per response token for each."""


class FunctionReward(Reward):
    """A plain function `fn(sample, **options) -> number` as a reward (or a list of numbers, see per_token)."""

    def __init__(self, function: Callable[..., Any], **options: Any):
        self.function = functools.partial(function, **options) if options else function

    def __call__(self, samples: Sequence[RewardSample]) -> list[Any]:
        return [self.function(sample) for sample in samples]


@attrs.frozen
class FailureRule:
    """What a reward function may do when it fails. As it stands a failure ends the run."""

    retries: int = attrs.field(default=0, validator=non_negative)
    """Further tries of a sample that failed."""
    timeout_s: float | None = attrs.field(default=None, validator=positive)
    """A try that takes longer has failed; none: it may take for ever."""
    score: float | None = None
    """What a sample gets whose tries have all failed; the log names it, and the metric <reward>_failed counts. None: the
    run ends."""
    at_once: int = attrs.field(default=32, validator=at_least(1))
    """Samples that an `async` function, or one with a timeout, works on at the same time."""
