"""Rewards at work: from samples to finite numbers, with errors that name the row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hybridflow.core.contracts.reward import FunctionReward, Reward, RewardSample
from hybridflow.core.errors import HybridFlowError, RewardError
from hybridflow.core.values.text import shorten


def score_samples(
    reward: Reward, samples: Sequence[RewardSample], name: str, per_token: bool = False
) -> Any:
    """float32 [n]: the reward of each sample; with `per_token` a list of float32 [T_i], one number per response token.
    Raises RewardError that names the reward, and the row that failed: its number, prompt and response; what the reward
    raised is the cause."""
    if not samples:
        return gathered([], per_token)
    if isinstance(reward, FunctionReward):
        given = [_score_one(reward, sample, name, row) for row, sample in enumerate(samples)]
    else:
        try:
            given = _as_list(reward(samples), len(samples), name)
        except Exception as error:
            _raise_for_row(reward, samples, name, error)
    rows = enumerate(zip(given, samples, strict=True))
    return gathered(
        [checked(value, name, row, sample, per_token) for row, (value, sample) in rows], per_token
    )


def gathered(values: list[Any], per_token: bool) -> Any:
    """What `checked` gave of each sample: a list of float32 [T_i], or float32 [n]."""
    return values if per_token else np.array(values, np.float32)


def _score_one(reward: Reward, sample: RewardSample, name: str, row: int) -> Any:
    try:
        return reward([sample])[0]
    except Exception as error:
        raise failure(_said(error), name, row, sample) from error


def _raise_for_row(
    reward: Reward, samples: Sequence[RewardSample], name: str, error: Exception
) -> None:
    """A batch call raised: find the row by scoring one by one."""
    if isinstance(error, _BadShape):
        raise RewardError(str(error)) from None
    for row, sample in enumerate(samples):
        try:
            reward([sample])
        except Exception as alone:
            raise failure(_said(alone), name, row, sample) from alone
    raise RewardError(
        f"reward {name!r} raised {type(error).__name__} for {len(samples)} rows together, though for none of them "
        f"alone: {error}"
    ) from error


class _BadShape(Exception):
    """A reward returned something else than one value per sample."""


def _as_list(given: Any, count: int, name: str) -> list[Any]:
    try:
        values = list(given)
    except TypeError:
        raise _BadShape(
            f"reward {name!r} returned {given!r}; it must return a list with one number for each of the {count} rows"
        ) from None
    if len(values) != count:
        raise _BadShape(
            f"reward {name!r} returned {len(values)} values for {count} rows; return one for each row"
        )
    return values


def checked(value: Any, name: str, row: int, sample: RewardSample, per_token: bool = False) -> Any:
    """float32, or with `per_token` float32 [T]. Raises RewardError for what is no finite number, or not one per token."""
    if not per_token:
        return _number(value, name, row, sample)
    length = len(sample.response_ids)
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        values = list(value)
    except TypeError:
        said = f"returned {value!r:.80}; with per_token = true return a list with one number for each of the {length} tokens"
        raise failure(said, name, row, sample) from None
    if len(values) != length:
        said = f"returned {len(values)} numbers for {length} response tokens; return one for each"
        raise failure(said, name, row, sample)
    return np.array([_number(one, name, row, sample) for one in values], np.float32)


def _number(value: Any, name: str, row: int, sample: RewardSample) -> np.float32:
    """Raises RewardError for what is no finite number."""
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        with np.errstate(over="ignore"):
            number = np.float32(float(value))
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise failure(f"returned {value!r:.80}; return a number", name, row, sample) from None
    if not np.isfinite(number):
        raise failure(f"returned {value!r}; return a finite float32 number", name, row, sample)
    return number


def _said(error: Exception) -> str:
    """What a reward raised; one that speaks to the user in our own words needs no type."""
    return (
        f"failed: {error}"
        if isinstance(error, HybridFlowError)
        else f"raised {type(error).__name__}: {error}"
    )


def failure(what: str, name: str, row: int, sample: RewardSample) -> RewardError:
    """What went wrong, with the reward's name and the row."""
    return RewardError(
        f"reward {name!r} {what} [row {row}: prompt {shorten(sample.prompt)}, response {shorten(sample.response)}]"
    )
