"""Right and wrong sums, as preferences."""

from __future__ import annotations

from typing import Any

from hybridflow.backends.data.arithmetic import ArithmeticSource
from hybridflow.core.rewards import RewardSample


class Pairs(ArithmeticSource):
    """The arithmetic rows with a wrong sum, of the other parity, beside the right one; odd sums count as unsafe."""

    def __getitem__(self, i: int) -> dict[str, Any]:
        row = super().__getitem__(i)
        right = row["a"] + row["b"]
        wrong = (right + 1 + 2 * ((7 * row["a"] + 3 * row["b"]) % 98)) % 200
        even, odd = (right, wrong) if right % 2 == 0 else (wrong, right)
        texts = {"wrong": f"{wrong:03d}", "even": f"{even:03d}", "odd": f"{odd:03d}"}
        return {**row, **texts, "even_unsafe": False, "odd_unsafe": True}


def nines(sample: RewardSample) -> float:
    """A cost: the share of digits that are a 9, which right answers need now and then."""
    return sample.response.count("9") / 3
