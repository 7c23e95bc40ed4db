"""The contract of rewards, which turn each generated response into a number."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from hybridflow.core.contracts.failure import FailureRule
from hybridflow.core.errors import RewardError
from hybridflow.core.validators import at_least, positive


@attrs.frozen(eq=False)
class RewardSample:
    """One response, as a reward gets it."""

    # The texts, and the row that they come from
    prompt: str
    """Text of the prompt, special tokens removed."""
    response: str
    """Text of the response, special tokens removed."""
    response_ids: np.ndarray
    """Tokens of the response, int64 [T], special tokens included."""
    meta: Mapping[str, Any]
    """The fields of the data's row; `answer` is the expected answer."""

    # The end of the response
    finish_reason: str = "stop"
    """Why generation ended: "stop", "length" (cut at the limit) or "abort"."""
    episode_return: float | None = None
    """Sum of the rewards that an environment gave; None without an environment."""
    written: np.ndarray | None = None
    """Mask, bool [T], of the tokens that the model wrote, not an environment; None: all."""

    @property
    def answer(self) -> str:
        """The expected answer, as text. Raises RewardError for a row without one."""
        answer = self.meta.get("answer")
        if answer is None:
            raise RewardError(
                "the row has no answer to compare with "
                f"(its fields are {', '.join(map(str, self.meta)) or 'none'}); "
                'set data.answer, for example data.answer = "{solution}"'
            )
        return str(answer)


class Reward(ABC):
    """The plugin contract. `__init__` takes the configured options as keyword arguments."""

    @abstractmethod
    def __call__(self, samples: Sequence[RewardSample]) -> Sequence[Any]:
        """Return one finite number per sample, in their order; higher is better.

        Where the config says per_token, an entry is a list with one number per response token.
        """

    @property
    def answers(self) -> bool:
        """Whether `answer` is implemented."""
        return type(self).answer is not Reward.answer

    def answer(self, sample: RewardSample) -> str | None:
        """Return the final answer of a response, normalised so that equal answers are equal texts.

        None where it has none. Optional: `hybridflow evaluate` needs it for maj@k.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say what an answer is")


class FunctionReward(Reward):
    """A plain function `fn(sample, **options)` as a reward; it returns the value of one sample.

    The function may have an attribute `answer`, a function that replaces the method.
    """

    def __init__(self, function: Callable[..., Any], **options: Any):
        self._answer = getattr(function, "answer", None)
        self.function = functools.partial(function, **options) if options else function

    def __call__(self, samples: Sequence[RewardSample]) -> list[Any]:
        return [self.function(sample) for sample in samples]

    @property
    def answers(self) -> bool:
        """Whether the function has an attribute `answer`."""
        return self._answer is not None

    def answer(self, sample: RewardSample) -> str | None:
        """Return the result of the function's `answer`."""
        if self._answer is None:
            return super().answer(sample)
        answer: str | None = self._answer(sample)
        return answer


def _no_mask(rule: RewardFailureRule, attribute: Any, score: float | None) -> None:
    if score is not None and rule.mask:
        raise ValueError(
            "score: contradicts mask = true, which leaves the row out; keep one of them"
        )


@attrs.frozen
class RewardFailureRule(FailureRule):
    """What happens when a reward function fails. By default a failure ends the run.

    `mask` leaves the row out and `score` gives it a score; with neither the run ends.
    """

    # Each try
    timeout_s: float | None = attrs.field(default=None, validator=positive)
    """Time limit of a try, in seconds; a longer one counts as failed. None sets no limit."""

    # After the last try
    score: float | None = attrs.field(default=None, validator=_no_mask)
    """Score of a sample whose tries have all failed; the log names the sample, and the metric
    <reward>_failed counts it."""

    # All samples
    at_once: int = attrs.field(default=32, validator=at_least(1))
    """Number of samples that an `async` function, or one with a timeout, works on concurrently."""

    @property
    def ends_run(self) -> bool:
        """Whether a sample whose tries have all failed ends the run."""
        return not self.mask and self.score is None
