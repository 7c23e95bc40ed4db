"""A test of whether counts agree with probabilities, without scipy."""

from __future__ import annotations

import numpy as np


def chi_square_score(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Return how many standard deviations Pearson's chi-square lies above its expectation.

    `counts` and `probabilities` are [K]. Cells with an expected count below 5 are taken together.
    The result is infinite if a cell with probability 0 has a count.

    With d degrees of freedom, (chi-square / d)^(1/3) is nearly normal with mean 1 - 2 / (9 d) and
    variance 2 / (9 d) (Wilson and Hilferty, 1931).
    """
    if counts[probabilities == 0].any():
        return float("inf")

    # Cells with too few expected counts become one cell.
    expected = counts.sum() * probabilities
    rare = expected < 5
    cells = list(counts[~rare])
    expected_cells = list(expected[~rare])
    if expected[rare].sum() > 0:
        cells.append(counts[rare].sum())
        expected_cells.append(expected[rare].sum())

    # One cell, or none, cannot disagree.
    degrees = len(expected_cells) - 1
    if degrees < 1:
        return 0.0

    pairs = zip(cells, expected_cells, strict=True)
    statistic = sum((seen - due) ** 2 / due for seen, due in pairs)
    variance = 2 / (9 * degrees)
    root = (statistic / degrees) ** (1 / 3)
    return float((root - (1 - variance)) / variance**0.5)
