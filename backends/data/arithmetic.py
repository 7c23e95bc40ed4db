"""Data source "arithmetic": the 10,000 sums of two numbers below 100.

It needs no file, so a run can be tried at once.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hybridflow.core.contracts.data_source import DataConfig, DataSource
from hybridflow.core.errors import ConfigError

SUMS = 100 * 100
"""The number of sums a + b with 0 <= a, b < 100, which are numbered 100 a + b."""


class ArithmeticSource(DataSource):
    """Rows {"a": 17, "b": 5, "prompt": "17+05=", "answer": "022"}.

    Numbers are padded with zeros, so that all prompts have one length, and all answers. Options:

    split: "train" (all but the held-out sums; the default), "held-out" or "all".
    held_out: number of held-out sums (default 500).
    split_seed: seed of the permutation that chooses them (default 0).
    rows: take only the first so many rows of the split (default 0: all).

    With the same `held_out` and `split_seed`, train and held-out sets have no row in common.
    """

    def __init__(self, config: DataConfig):
        super().__init__(config)
        options = self.read_options(split="train", held_out=500, split_seed=0, rows=0)
        problems = _problems(options)
        if problems:
            raise ConfigError(problems)

        # The first `held_out` of a permutation are held out. Philox gives the same one anywhere.
        held_out = options["held_out"]
        generator = np.random.Generator(np.random.Philox(key=options["split_seed"]))
        order = generator.permutation(SUMS)
        splits = {"train": order[held_out:], "held-out": order[:held_out], "all": np.arange(SUMS)}
        sums = splits[options["split"]]

        rows = options["rows"]
        self._sums = sums[:rows] if rows else sums

    def __len__(self) -> int:
        return len(self._sums)

    def __getitem__(self, i: int) -> dict[str, Any]:
        # The inverse of 100 a + b.
        a, b = divmod(int(self._sums[i]), 100)
        return {"a": a, "b": b, "prompt": f"{a:02d}+{b:02d}=", "answer": f"{a + b:03d}"}


def _problems(options: dict[str, Any]) -> list[str]:
    """Return all problems of the options."""
    split = options["split"]
    held_out = options["held_out"]
    seed = options["split_seed"]
    rows = options["rows"]
    problems = []

    # Which sums
    if split not in ("train", "held-out", "all"):
        problems.append(f'data.options.split is {split!r}; it must be "train", "held-out" or "all"')
    if not 1 <= held_out < SUMS:
        problems.append(
            f"data.options.held_out is {held_out}; it must be 1 to {SUMS - 1} of the {SUMS} sums"
        )

    # In which order, and how many
    if seed < 0:
        problems.append(f"data.options.split_seed is {seed}; it cannot be negative")
    if not 0 <= rows <= SUMS:
        problems.append(f"data.options.rows is {rows}; it must be 0 (all of the split) to {SUMS}")
    return problems
