"""Random ragged columns and outputs, in the ranges that a real run gives them."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import torch

from hybridflow.core.values.columns import Column

K = 3
"""Entries of top-k columns."""


@attrs.frozen(eq=False)
class Shape:
    """Which rows there are. `per_token` and `per_row` make columns of random numbers."""

    lengths: np.ndarray
    """int64 [rows]: response tokens."""
    units: np.ndarray
    """int64 [rows]: rows with equal entries are one unit."""
    unit: str
    generator: torch.Generator

    @classmethod
    def random(cls, rows: int, longest: int, unit_size: int, unit: str, seed: int) -> Shape:
        generator = torch.Generator().manual_seed(1234 + seed)
        lengths = torch.randint(1, longest + 1, (rows,), generator=generator).numpy()
        lengths[0] = longest
        return cls(lengths, np.repeat(np.arange(rows // unit_size), unit_size), unit, generator)

    @property
    def rows(self) -> int:
        return len(self.lengths)

    def per_token(
        self, low: float | None = None, high: float = 1.0, trailing: tuple[int, ...] = ()
    ) -> Column:
        """Uniform in [low, high), or standard normal without `low`."""
        return Column(self._numbers((int(self.lengths.sum()), *trailing), low, high), self.lengths)

    def per_row(self, low: float | None = None, high: float = 1.0) -> torch.Tensor:
        return self._numbers((self.rows,), low, high)

    def _numbers(self, size: tuple[int, ...], low: float | None, high: float) -> torch.Tensor:
        if low is None:
            return torch.randn(size, generator=self.generator)
        return low + (high - low) * torch.rand(size, generator=self.generator)


def standard_column(name: str, shape: Shape) -> Any:
    """Random values for the columns of architecture.md's list. Raises LookupError for others."""
    tokens = int(shape.lengths.sum())
    if name in ("prompt_ids", "response_ids"):
        return Column(torch.randint(0, 50, (tokens,), generator=shape.generator), shape.lengths)
    if name == "loss_mask":
        mask = (torch.rand(tokens, generator=shape.generator) < 0.8).to(torch.uint8)
        mask[np.cumsum(shape.lengths) - shape.lengths] = 1  # each row has a token
        return Column(mask, shape.lengths)
    if name == "topk_ids":
        return Column(torch.randint(0, 50, (tokens, K), generator=shape.generator), shape.lengths)
    if name == "topk_logprobs" or name.endswith("topk_logprobs"):
        everything = shape.per_token(trailing=(K + 1,)).values
        return Column(torch.as_tensor(everything).log_softmax(-1)[:, :K], shape.lengths)
    if name.endswith("logprobs"):
        return shape.per_token(-3.0, -0.05)
    if name == "entropy":
        return shape.per_token(0.1, 3.0)
    if name == "weight_version":
        return Column(torch.ones(tokens, dtype=torch.int32), shape.lengths)
    if name.endswith(("values", "advantages", "returns")) or name == "rewards":
        return shape.per_token()
    if name in ("scores", "costs", "baseline_scores") or name.startswith("rewards/"):
        return shape.per_row()
    if name == shape.unit or name in ("group", "pair"):
        return torch.from_numpy(shape.units.copy())
    if name == "preferred":
        first = np.append(True, np.diff(shape.units) != 0)
        return torch.from_numpy(first)
    if name in ("unsafe", "episode", "sample_id"):
        return torch.arange(shape.rows) % 2 if name == "unsafe" else torch.arange(shape.rows)
    if name in ("meta", "finish_reason"):
        return (
            ["stop"] * shape.rows
            if name == "finish_reason"
            else [{"answer": "1"} for _ in range(shape.rows)]
        )
    raise LookupError(
        f"the kit has no values for column {name!r}; override columns(name, shape) of the conformance class and return "
        "shape.per_token(low, high) or shape.per_row(low, high) for it"
    )


def standard_output(name: str, shape: Shape, columns: dict[str, Column]) -> list[torch.Tensor]:
    """Per row. New logprobs lie around the old ones, so that some ratios are clipped and some are not."""
    if name == "scores":
        return list(shape.per_row())
    column = standard_column(name, shape)
    near = next(
        (c for c in ("old_logprobs", "ref_logprobs", "rollout_logprobs") if c in columns), None
    )
    if name == "logprobs" and near is not None:
        column = Column(
            torch.as_tensor(columns[near].values) + 0.3 * torch.as_tensor(shape.per_token().values),
            shape.lengths,
        )
    if name == "values" and "values" in columns:
        column = Column(
            torch.as_tensor(columns["values"].values) + 0.3 * torch.as_tensor(column.values),
            shape.lengths,
        )
    return list(column)
