"""Figures of scored responses: pass@k, the majority's score, and intervals.

Intervals are percentiles of bootstrap means over rows (Efron and Tibshirani, 1993, chapter 13): the
rows are drawn with replacement, so they say how much the figure depends on the choice of rows.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import comb

import attrs
import numpy as np

RESAMPLES = 10_000
"""Bootstrap samples of an interval."""
LEVEL = 0.95
"""Confidence level: the share of the bootstrap means that an interval covers."""
AT_ONCE = 4_000_000
"""The most resampled values that are in memory at a time."""


@attrs.frozen
class Figure:
    """The mean of a figure over rows, and its interval."""

    mean: float
    low: float
    high: float
    rows: int

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Return the chance that one of k responses is right, of `samples` of which `right` are.

    1 - C(samples - right, k) / C(samples, k), which is unbiased (arXiv:2107.03374, equation 1).
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} needs k from 1 to the number of samples, {samples}")
    return 1.0 - comb(samples - right, k) / comb(samples, k)


def majority_score(answers: Sequence[Hashable | None], scores: Sequence[float]) -> float:
    """Return the score of the answer that most responses give (maj@k, arXiv:2203.11171).

    An answer None does not vote. The score of an answer is the mean over its responses; the result
    is the mean over the answers with the most votes, and 0 without any answer.
    """
    by_answer: dict[Hashable, list[float]] = {}
    for answer, score in zip(answers, scores, strict=True):
        if answer is not None:
            by_answer.setdefault(answer, []).append(score)
    if not by_answer:
        return 0.0
    most = max(map(len, by_answer.values()))
    first = [float(np.mean(own)) for own in by_answer.values() if len(own) == most]
    return float(np.mean(first))


def figure(values: Sequence[float], seed: int = 0) -> Figure:
    """Return the mean of one value per row, with its bootstrap interval."""
    rows = np.asarray(values, np.float64)
    low, high = interval(rows, seed)
    return Figure(float(rows.mean()), low, high, len(rows))


def interval(values: np.ndarray, seed: int = 0) -> tuple[float, float]:
    """Return the bounds of the central LEVEL of the bootstrap means of `values` [rows]."""
    rng = np.random.default_rng(seed)
    rows = len(values)
    step = max(1, AT_ONCE // rows)
    means = []
    for start in range(0, RESAMPLES, step):
        count = min(step, RESAMPLES - start)
        means.append(values[rng.integers(rows, size=(count, rows))].mean(1))
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(np.concatenate(means), [tail, 1 - tail], method="inverted_cdf")
    return float(low), float(high)


def difference(values: Sequence[float], others: Sequence[float], seed: int = 0) -> Figure:
    """Return the mean of values - others, paired row by row, with its interval."""
    return figure(np.subtract(values, others).tolist(), seed)
