"""Data source "seeds": rows with a number each, from which an environment draws its world."""

from __future__ import annotations

from typing import Any

from hybridflow.core.contracts.data_source import DataConfig, DataSource
from hybridflow.core.errors import ConfigError


class SeedSource(DataSource):
    """Rows {"prompt": "go", "seed": 200, "answer": ""}, one for each world. Options:

    prompt: the prompt of every row (default "go").
    rows: number of seeds, from 0 on (default 10000).
    split: "train" (the default) or "held-out".
    held_out: number of held-out rows, the first ones (default 200).
    """

    def __init__(self, config: DataConfig):
        super().__init__(config)
        options = self.read_options(prompt="go", rows=10_000, split="train", held_out=200)
        self._prompt = options["prompt"]
        rows, split, cut = options["rows"], options["split"], options["held_out"]
        problems = []
        if split not in ("train", "held-out"):
            problems.append(f'data.options.split is {split!r}; it must be "train" or "held-out"')
        if not 0 < cut < rows:
            problems.append(f"data.options.held_out is {cut}; it must be 1 to {rows - 1} of {rows}")
        if problems:
            raise ConfigError(problems)
        self._seeds = range(cut) if split == "held-out" else range(cut, rows)

    def __len__(self) -> int:
        return len(self._seeds)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"prompt": self._prompt, "seed": self._seeds[i], "answer": ""}
