"""Calls of rewards: from samples to finite numbers, with errors that name the row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hybridflow.core.contracts.reward import FunctionReward, Reward, RewardSample
from hybridflow.core.errors import HybridFlowError, RewardError
from hybridflow.core.processes.page import doing
from hybridflow.core.values.text import shorten


def score_samples(
    reward: Reward, samples: Sequence[RewardSample], name: str, per_token: bool = False
) -> Any:
    """Return the reward of each sample, float32 [n].

    With `per_token` a list of float32 [T_i], one number per response token. Raises RewardError that
    names the reward and the row that failed: its number, prompt and response. Its cause is the
    reward's own error.
    """
    if not samples:
        return gathered([], per_token)

    # A function scores one sample at a time, a class the whole batch.
    if isinstance(reward, FunctionReward):
        values = [_score_one(reward, sample, name, row) for row, sample in enumerate(samples)]
    else:
        try:
            with doing(f"reward {name!r}, {len(samples)} rows at once"):
                values = _as_list(reward(samples), len(samples), name)
        except Exception as error:
            _raise_for_row(reward, samples, name, error)

    rows = enumerate(zip(values, samples, strict=True))
    numbers = [checked(value, name, row, sample, per_token) for row, (value, sample) in rows]
    return gathered(numbers, per_token)


def gathered(values: list[Any], per_token: bool) -> Any:
    """Return the results of `checked` as a list of float32 [T_i], or as float32 [n]."""
    return values if per_token else np.array(values, np.float32)


def _score_one(reward: Reward, sample: RewardSample, name: str, row: int) -> Any:
    try:
        with doing(f"reward {name!r}, row {row}"):
            return reward([sample])[0]
    except Exception as error:
        raise failure(_description(error, sample), name, row, sample) from error


def _raise_for_row(
    reward: Reward, samples: Sequence[RewardSample], name: str, error: Exception
) -> None:
    """Find the row for which a batch call raised, by scoring one by one, and raise for it."""
    if isinstance(error, _BadShape):
        raise RewardError(str(error)) from None

    # Scoring again takes time, but only a run that fails pays for it.
    for row, sample in enumerate(samples):
        try:
            reward([sample])
        except Exception as row_error:
            raise failure(_description(row_error, sample), name, row, sample) from row_error
    raise RewardError(
        f"reward {name!r} raised {type(error).__name__} for {len(samples)} rows together, "
        f"though for none of them alone: {error}"
    ) from error


class _BadShape(Exception):
    """A reward did not return one value per sample."""


def _as_list(returned: Any, count: int, name: str) -> list[Any]:
    """Return the values that a reward returned. Raises _BadShape unless there are `count`."""
    try:
        values = list(returned)
    except TypeError:
        raise _BadShape(
            f"reward {name!r} returned {returned!r}; it must return a list with one number "
            f"for each of the {count} rows"
        ) from None

    if len(values) != count:
        raise _BadShape(
            f"reward {name!r} returned {len(values)} values for {count} rows; "
            "return one for each row"
        )
    return values


def checked(value: Any, name: str, row: int, sample: RewardSample, per_token: bool = False) -> Any:
    """Return the value of one sample as float32, or with `per_token` as float32 [T].

    Raises RewardError unless it is a finite number, or one per response token.
    """
    if not per_token:
        return _number(value, name, row, sample)

    # A text is a sequence too, though no list of numbers.
    length = len(sample.response_ids)
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        values = list(value)
    except TypeError:
        problem = (
            f"returned {value!r:.80}; with per_token = true return a list with one number "
            f"for each of the {length} tokens"
        )
        raise failure(problem, name, row, sample) from None

    if len(values) != length:
        problem = (
            f"returned {len(values)} numbers for {length} response tokens; return one for each"
        )
        raise failure(problem, name, row, sample)
    return np.array([_number(one, name, row, sample) for one in values], np.float32)


def _number(value: Any, name: str, row: int, sample: RewardSample) -> np.float32:
    """Return the value as float32. Raises RewardError unless it is a finite number."""
    try:
        if isinstance(value, str | bytes):  # float("1") would accept a text
            raise TypeError
        with np.errstate(over="ignore"):
            number = np.float32(float(value))
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise failure(f"returned {value!r:.80}; return a number", name, row, sample) from None

    # Too large for float32 is infinite here.
    if not np.isfinite(number):
        raise failure(f"returned {value!r}; return a finite float32 number", name, row, sample)
    return number


def _description(error: Exception, sample: RewardSample) -> str:
    """Return a reward's error in words."""
    if isinstance(error, HybridFlowError):
        return f"failed: {error}"  # a message to the user already, which needs no type
    fields = ""
    if isinstance(error, KeyError) and error.args[0] not in sample.meta:
        fields = f" (sample.meta has {', '.join(map(str, sample.meta)) or 'nothing'})"
    return f"raised {type(error).__name__}: {error}{fields}"


def failure(what: str, name: str, row: int, sample: RewardSample) -> RewardError:
    """Return the error of a reward for one row; `what` is the problem."""
    return RewardError(
        f"reward {name!r} {what} [row {row}: prompt {shorten(sample.prompt)}, "
        f"response {shorten(sample.response)}]"
    )
