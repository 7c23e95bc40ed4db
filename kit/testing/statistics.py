"""Whether counts are what probabilities say, without scipy."""

from __future__ import annotations

import numpy as np


def chi_square_score(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """How many standard deviations Pearson's chi-square lies above what it should be (Wilson and Hilferty, 1931).

    `counts`, `probabilities`: [K]. Cells with an expected count below 5 are taken together. Infinite if something came
    that has probability 0.
    """
    if counts[probabilities == 0].any():
        return float("inf")
    expected = counts.sum() * probabilities
    rare = expected < 5
    seen, due = list(counts[~rare]), list(expected[~rare])
    if expected[rare].sum() > 0:
        seen.append(counts[rare].sum())
        due.append(expected[rare].sum())
    degrees = len(due) - 1
    if degrees < 1:
        return 0.0
    statistic = sum((s - d) ** 2 / d for s, d in zip(seen, due, strict=True))
    spread = 2 / (9 * degrees)
    return float(((statistic / degrees) ** (1 / 3) - (1 - spread)) / spread**0.5)
