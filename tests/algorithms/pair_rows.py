"""A data source of preferences, by path: sums with a right and a wrong answer."""

from __future__ import annotations

from hybridflow.core.data import DataConfig, DataSource


class RightAndWrong(DataSource):
    def __init__(self, config: DataConfig):
        super().__init__(config)
        self.read_options()

    def __len__(self):
        return 64

    def __getitem__(self, i):
        return {"prompt": f"{i:02d}+01=", "chosen": f"{i + 1}", "rejected": f"{(i * 37) % 1000:03d}"}
