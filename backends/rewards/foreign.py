"""Rewards "trl" and "verl": functions that were written for these libraries, unchanged.

[reward]
function = "trl"                              or "verl"
options = { function = "my_rewards:accuracy" }
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from hybridflow.core.contracts.reward import Reward, RewardSample
from hybridflow.core.errors import ConfigError, RewardError
from hybridflow.core.plugins import registry

NOT_COLUMNS = ("prompt", "completion", "completion_ids")
"""Fields of a row that TRL does not pass as columns: they have arguments of their own."""


class TRLReward(Reward):
    """A reward function of TRL's GRPOTrainer (1.16): lists in, a list of numbers out.

    It gets prompts, completions, completion_ids, and each of the row's other fields as a list; of
    rows whose field `prompt` is a chat, prompts and completions are lists of messages. Its
    `trainer_state` is None, and `log_extra` and `log_metric` do nothing. A result None, by which a
    function skips a row, counts as 0. In TRL a row that all functions skip is left out of its
    group; here it has the score 0.
    """

    def __init__(self, function: str, **options: Any):
        """`function`: its path, "package.module:function"; `options`: further arguments of it."""
        self.function = loaded(function, "completions")
        self.options = options

    def __call__(self, samples: Sequence[RewardSample]) -> list[float]:
        rows = [sample.meta for sample in samples]
        keys = [key for key in rows[0] if key not in NOT_COLUMNS]
        columns = {key: [row.get(key) for row in rows] for key in keys}

        # A chat stays one: TRL's functions look into messages.
        chats = all(isinstance(row.get("prompt"), list) for row in rows)
        prompts: list[Any] = [sample.prompt for sample in samples]
        completions: list[Any] = [sample.response for sample in samples]
        if chats:
            prompts = [row["prompt"] for row in rows]
            completions = [[{"role": "assistant", "content": text}] for text in completions]

        scores = self.function(
            prompts=prompts,
            completions=completions,
            completion_ids=[sample.response_ids.tolist() for sample in samples],
            **columns,
            trainer_state=None,
            log_extra=lambda column, values: None,
            log_metric=lambda name, value: None,
            **self.options,
        )
        if inspect.isawaitable(scores):
            scores = asyncio.run(_result(scores))
        return [0.0 if score is None else score for score in scores]


class VerlReward(Reward):
    """A `compute_score` of verl (0.9): one response in, a number or a dict with `score` out.

    It gets data_source and extra_info from the row's fields, and ground_truth from its field
    `reward_model`, or from data.answer where there is none.
    """

    def __init__(self, function: str, **options: Any):
        """`function`: its path, "package.module:function"; `options`: verl's reward_kwargs."""
        self.function = loaded(function, "solution_str")
        self.options = options

    def __call__(self, samples: Sequence[RewardSample]) -> list[float]:
        return [self._score(sample) for sample in samples]

    def _score(self, sample: RewardSample) -> float:
        """Score one response; raises RewardError for a dict without a score."""
        meta = sample.meta
        truth = meta["reward_model"]["ground_truth"] if "reward_model" in meta else sample.answer
        score = self.function(
            data_source=meta.get("data_source"),
            solution_str=sample.response,
            ground_truth=truth,
            extra_info=dict(meta.get("extra_info") or {}),
            **self.options,
        )
        if inspect.isawaitable(score):
            score = asyncio.run(_result(score))
        if isinstance(score, dict):
            if "score" not in score:
                raise RewardError(f"compute_score returned a dict without `score`: {list(score)}")
            score = score["score"]
        return float(score)


def loaded(path: str, parameter: str) -> Callable[..., Any]:
    """Return the function at a path. Raises ConfigError where it does not take `parameter`."""
    function: Callable[..., Any] = registry().get("reward", path)
    if not callable(function) or not _takes(function, parameter):
        raise ConfigError(
            f"options.function = {path!r} is no function with a parameter {parameter!r}; a "
            "function of one sample is named by reward.function itself"
        )
    return function


def _takes(function: Callable[..., Any], parameter: str) -> bool:
    parameters = inspect.signature(function).parameters
    return parameter in parameters or any(
        one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()
    )


async def _result(awaitable: Any) -> Any:
    return await awaitable
