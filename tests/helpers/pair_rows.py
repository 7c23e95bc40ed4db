"""A data source of preferences, by path: sums with a right and a wrong answer; and a reward."""

from __future__ import annotations

import math
from typing import Any

import pytest

from hybridflow.core.contracts.data_source import DataConfig, DataSource
from hybridflow.core.contracts.reward import RewardSample

DATA = {
    "source": "helpers.pair_rows:RightAndWrong", "answer": "{chosen}", "response": "{chosen}",
    "rejected": "{rejected}",
}  # fmt: skip
UNSAFE = {**DATA, "unsafe": ["chosen_unsafe", "rejected_unsafe"]}


class RightAndWrong(DataSource):
    def __init__(self, config: DataConfig):
        super().__init__(config)
        self.read_options()

    def __len__(self):
        return 64

    def __getitem__(self, i):
        texts = {
            "prompt": f"{i:02d}+01=",
            "chosen": f"{i + 1}",
            "rejected": f"{(i * 37) % 1000:03d}",
        }
        return {**texts, "chosen_unsafe": i % 4 == 0, "rejected_unsafe": i % 3 > 0}


def odd_tokens(sample: RewardSample) -> float:
    """The share of tokens with an odd id."""
    ids = sample.response_ids
    return float((ids % 2 == 1).mean()) if len(ids) else 0.0


def values(terms: Any) -> dict[str, Any]:
    """The values of a loss's terms by name, to be compared."""
    return {term.name: pytest.approx(term.value.tolist(), rel=1e-5) for term in terms}


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


def late_over_early(metrics: list[dict[str, float]], name: str, last: int, first: int) -> float:
    """How much the mean of a figure has risen from the first steps to the last."""
    late, early = [m[name] for m in metrics[-last:]], [m[name] for m in metrics[:first]]
    return sum(late) / len(late) - sum(early) / len(early)
