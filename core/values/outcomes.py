"""Outcomes of rows, the column `outcome`: how a response or an episode ended.

A failed row has a score of NaN and a loss_mask of zeros: nobody is trained on it, and its group
does without it. A truncated row is scored and trained on like a complete one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

COMPLETE = "complete"
"""It ended by itself."""
TRUNCATED_TOKENS = "truncated_tokens"
"""Its limit of tokens was reached."""
TRUNCATED_TURNS = "truncated_turns"
"""environment.max_turns was reached."""
TRUNCATED_TIME = "truncated_time"
"""environment.episode_s was reached."""
ABORTED = "aborted"
"""The engine was told to end it."""
FAILED_TOOL = "failed_tool"
"""The environment's answer to a turn raised, or took too long."""
FAILED_ENVIRONMENT = "failed_environment"
"""The environment could not begin, or its answer was none."""
FAILED_REWARD = "failed_reward"
"""A reward function failed."""

EPISODE_OUTCOMES = (
    COMPLETE,
    TRUNCATED_TOKENS,
    TRUNCATED_TURNS,
    TRUNCATED_TIME,
    FAILED_TOOL,
    FAILED_ENVIRONMENT,
)
"""Those of an episode, whose shares are metrics."""


def finished(reason: str) -> str:
    """Return the outcome of a row whose generation ended for this finish_reason."""
    return {"stop": COMPLETE, "length": TRUNCATED_TOKENS}.get(reason, ABORTED)


def failed(outcome: str) -> bool:
    """Return whether the outcome is a failure."""
    return outcome.startswith("failed_")


def failed_rows(outcomes: Sequence[str]) -> np.ndarray:
    """Return which rows failed, bool [rows]."""
    return np.array([failed(outcome) for outcome in outcomes], bool)


def finish_reason(outcome: str) -> str:
    """Return the finish_reason of an episode: "stop", "length", or "abort" for a failed one."""
    if failed(outcome):
        return "abort"
    if outcome.startswith("truncated_"):
        return "length"
    return "stop" if outcome == COMPLETE else "abort"
