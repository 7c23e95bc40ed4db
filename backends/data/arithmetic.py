"""Data source "arithmetic": the 10,000 sums of two numbers below 100, to try a run without any file."""

from __future__ import annotations

from typing import Any

import numpy as np

from hybridflow.core.contracts.data_source import DataConfig, DataSource
from hybridflow.core.errors import ConfigError

SUMS = 100 * 100


class ArithmeticSource(DataSource):
    """Rows {"a": 17, "b": 5, "prompt": "17+05=", "answer": "022"}: zero-padded, so that every row has equal lengths.

    Options: `split` ("train": all but the held-out sums, "held-out", "all"); `held_out` (sums, default 500);
    `split_seed` (which ones); `rows` (only the first so many of the split, default 0: all). The same `held_out` and
    `split_seed` give train and held-out sets without a common row.
    """

    def __init__(self, config: DataConfig):
        super().__init__(config)
        options = self.read_options(split="train", held_out=500, split_seed=0, rows=0)
        split, held_out, seed = options["split"], options["held_out"], options["split_seed"]
        rows = options["rows"]
        problems = []
        if split not in ("train", "held-out", "all"):
            problems.append(
                f'data.options.split is {split!r}; it must be "train", "held-out" or "all"'
            )
        if not 1 <= held_out < SUMS:
            problems.append(
                f"data.options.held_out is {held_out}; it must be 1 to {SUMS - 1} of the {SUMS} sums"
            )
        if seed < 0:
            problems.append(f"data.options.split_seed is {seed}; it cannot be negative")
        if not 0 <= rows <= SUMS:
            problems.append(
                f"data.options.rows is {rows}; it must be 0 (all of the split) to {SUMS}"
            )
        if problems:
            raise ConfigError(problems)
        order = np.random.Generator(np.random.Philox(key=seed)).permutation(SUMS)
        sums = {"train": order[held_out:], "held-out": order[:held_out], "all": np.arange(SUMS)}[
            split
        ]
        self._sums = sums[:rows] if rows else sums

    def __len__(self) -> int:
        return len(self._sums)

    def __getitem__(self, i: int) -> dict[str, Any]:
        a, b = divmod(int(self._sums[i]), 100)
        return {"a": a, "b": b, "prompt": f"{a:02d}+{b:02d}=", "answer": f"{a + b:03d}"}
