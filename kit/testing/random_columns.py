"""Random ragged columns and outputs, in the ranges that a real run gives them."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import torch

from hybridflow.core.values.columns import Column

K = 3
"""Entries of top-k columns."""
TOKEN_IDS = 50
"""Token ids are below it."""


@attrs.frozen(eq=False)
class RowShapes:
    """The rows of a mini-batch: their lengths, and which of them form a unit.

    `per_token` and `per_row` make columns of random numbers for these rows.
    """

    lengths: np.ndarray
    """int64 [rows]: response tokens."""
    units: np.ndarray
    """int64 [rows]: rows with equal entries are one unit."""
    unit: str
    """The loss's unit: "row", or the name of the column that has `units`."""
    generator: torch.Generator
    """The source of all random numbers of the columns."""

    @classmethod
    def random(
        cls,
        rows: int,
        longest: int,
        unit_size: int,
        unit: str,
        seed: int,
    ) -> RowShapes:
        """Return a shape with lengths from 1 to `longest`, which the first row has.

        Each run of `unit_size` neighbouring rows is one unit.
        """
        generator = torch.Generator().manual_seed(1234 + seed)
        lengths = torch.randint(1, longest + 1, (rows,), generator=generator).numpy()
        # The width of the mini-batch is always the same.
        lengths[0] = longest
        units = np.repeat(np.arange(rows // unit_size), unit_size)
        return cls(lengths, units, unit, generator)

    @property
    def rows(self) -> int:
        """The number of rows."""
        return len(self.lengths)

    def per_token(
        self,
        low: float | None = None,
        high: float = 1.0,
        trailing: tuple[int, ...] = (),
    ) -> Column:
        """Return a float32 column [tokens, *trailing], split by the rows' lengths.

        It is uniform in [low, high), or standard normal without `low`.
        """
        size = (int(self.lengths.sum()), *trailing)
        return Column(self._numbers(size, low, high), self.lengths)

    def per_row(self, low: float | None = None, high: float = 1.0) -> torch.Tensor:
        """Return float32 [rows], drawn as `per_token` draws."""
        return self._numbers((self.rows,), low, high)

    def _numbers(self, size: tuple[int, ...], low: float | None, high: float) -> torch.Tensor:
        if low is None:
            return torch.randn(size, generator=self.generator)
        return low + (high - low) * torch.rand(size, generator=self.generator)


def standard_column(name: str, shape: RowShapes) -> Any:
    """Return random values for one of the columns that docs/batch.md lists.

    Raises LookupError for other names.
    """
    tokens = int(shape.lengths.sum())
    generator = shape.generator

    # Columns per token
    if name in ("prompt_ids", "response_ids"):
        ids = torch.randint(0, TOKEN_IDS, (tokens,), generator=generator)
        return Column(ids, shape.lengths)
    if name == "loss_mask":
        mask = (torch.rand(tokens, generator=generator) < 0.8).to(torch.uint8)
        mask[np.cumsum(shape.lengths) - shape.lengths] = 1  # the first token of each row counts
        return Column(mask, shape.lengths)
    if name == "topk_ids":
        ids = torch.randint(0, TOKEN_IDS, (tokens, K), generator=generator)
        return Column(ids, shape.lengths)
    if name == "topk_logprobs" or name.endswith("topk_logprobs"):
        # K of K + 1 log-probabilities of a distribution, so that some mass is left.
        logits = torch.as_tensor(shape.per_token(trailing=(K + 1,)).values)
        return Column(logits.log_softmax(-1)[:, :K], shape.lengths)
    if name.endswith("logprobs"):
        return shape.per_token(-3.0, -0.05)
    if name == "entropy":
        return shape.per_token(0.1, 3.0)
    if name == "weight_version":
        return Column(torch.ones(tokens, dtype=torch.int32), shape.lengths)
    if name.endswith(("values", "advantages", "returns")) or name == "rewards":
        return shape.per_token()

    # Columns per row
    if name in ("scores", "costs", "baseline_scores") or name.startswith("rewards/"):
        return shape.per_row()
    if name == shape.unit or name in ("group", "pair"):
        return torch.from_numpy(shape.units.copy())
    if name == "preferred":
        first_of_unit = np.append(True, np.diff(shape.units) != 0)
        return torch.from_numpy(first_of_unit)
    if name == "unsafe":
        return torch.arange(shape.rows) % 2
    if name in ("episode", "sample_id"):
        return torch.arange(shape.rows)

    # Columns of objects
    if name == "finish_reason":
        return ["stop"] * shape.rows
    if name == "meta":
        return [{"answer": "1"} for _ in range(shape.rows)]
    raise LookupError(
        f"the kit has no values for column {name!r}; override columns(name, shape) of the "
        "conformance class and return shape.per_token(low, high) or shape.per_row(low, high) for it"
    )


def standard_output(name: str, shape: RowShapes, columns: dict[str, Column]) -> list[torch.Tensor]:
    """Return a random output of the model: one tensor [T, ...] per row; of scores, one [].

    New logprobs lie around the old ones, so that some ratios are clipped and some are not. New
    values lie around the old ones too.
    """
    if name == "scores":
        return list(shape.per_row())

    # The new logprobs lie around the first of these columns that is there.
    column = standard_column(name, shape)
    earlier = ("old_logprobs", "ref_logprobs", "rollout_logprobs")
    near = next((other for other in earlier if other in columns), None)
    if name == "logprobs" and near is not None:
        old = torch.as_tensor(columns[near].values)
        noise = torch.as_tensor(shape.per_token().values)
        column = Column(old + 0.3 * noise, shape.lengths)
    if name == "values" and "values" in columns:
        old = torch.as_tensor(columns["values"].values)
        noise = torch.as_tensor(column.values)
        column = Column(old + 0.3 * noise, shape.lengths)
    return list(column)
