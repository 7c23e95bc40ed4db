"""Right and wrong sums, as preferences."""

from __future__ import annotations

from typing import Any

from hybridflow.backends.data.arithmetic import ArithmeticSource
from hybridflow.core.rewards import RewardSample


class Pairs(ArithmeticSource):
    """The arithmetic rows with a wrong sum beside the right one; of the two an odd one counts as unsafe."""

    def __getitem__(self, i: int) -> dict[str, Any]:
        row = super().__getitem__(i)
        right = row["a"] + row["b"]
        wrong = (right + 1 + (7 * row["a"] + 3 * row["b"]) % 197) % 200
        return {**row, "wrong": f"{wrong:03d}", "wrong_odd": wrong % 2 == 1, "answer_odd": right % 2 == 1}


def nines(sample: RewardSample) -> float:
    """A cost: the share of digits that are a 9, which right answers need now and then."""
    return sample.response.count("9") / 3
