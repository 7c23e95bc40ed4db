"""A data source of preferences, by path: sums with a right and a wrong answer; and a reward."""

from __future__ import annotations

from hybridflow.core.contracts.data_source import DataConfig, DataSource
from hybridflow.core.contracts.reward import RewardSample


class RightAndWrong(DataSource):
    def __init__(self, config: DataConfig):
        super().__init__(config)
        self.read_options()

    def __len__(self):
        return 64

    def __getitem__(self, i):
        texts = {"prompt": f"{i:02d}+01=", "chosen": f"{i + 1}", "rejected": f"{(i * 37) % 1000:03d}"}
        return {**texts, "chosen_unsafe": i % 4 == 0, "rejected_unsafe": i % 3 > 0}


def odd_tokens(sample: RewardSample) -> float:
    """The share of tokens with an odd id."""
    ids = sample.response_ids
    return float((ids % 2 == 1).mean()) if len(ids) else 0.0
