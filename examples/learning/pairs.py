"""Right and wrong sums as preferences, and a cost that right sums have."""

from __future__ import annotations

from typing import Any

from hybridflow.backends.data.arithmetic import ArithmeticSource
from hybridflow.core.contracts.reward import RewardSample


class Pairs(ArithmeticSource):
    """The arithmetic rows with a wrong sum, of the other parity, beside the right one; odd sums count as unsafe."""

    def __getitem__(self, i: int) -> dict[str, Any]:
        row = super().__getitem__(i)
        right = row["a"] + row["b"]
        wrong = (right + 1 + 2 * ((7 * row["a"] + 3 * row["b"]) % 98)) % 200
        even, odd = (right, wrong) if right % 2 == 0 else (wrong, right)
        texts = {"wrong": f"{wrong:03d}", "even": f"{even:03d}", "odd": f"{odd:03d}"}
        return {**row, **texts, "even_unsafe": False, "odd_unsafe": True}


def last_digit(sample: RewardSample) -> float:
    """A cost, from 0 to 1: the last digit over 9. Right sums need large ones, so a limit under 0.5 costs right answers."""
    digits = sample.response.strip()
    return int(digits[-1]) / 9 if digits[-1:].isdigit() else 0.0
