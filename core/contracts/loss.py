"""Losses: what an author declares and returns, and how the core reduces it.

A loss sees full padded rows and returns terms; the core divides each by counts of the whole mini-batch (all ranks, all
micro-batches), taken before the forward. So the result does not depend on how rows are split. Rows, or whole units,
without a token to train on are left out before the forward: what a loss sees counts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch

REDUCTIONS = (
    "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "unit-mean", "max",
)  # fmt: skip


@attrs.frozen
class Counts:
    """Of a mini-batch, over all ranks: tokens with loss_mask 1, rows that have one, and units that do."""

    tokens: float
    sequences: float
    units: float = 0.0


@attrs.frozen(eq=False)
class Term:
    """One addend of a loss, or with weight 0 a figure to report.

    value: [B, T] per token, or [U] per unit (rows: U = B) with how="unit-mean".
    mask: [B, T] 1 where the value counts, default the batch's loss_mask; of unit-mean [U], default all. It is the
        numerator's: what it drops stays in the denominator, which is the mini-batch's.
    how: token-mean: sum / tokens. seq-mean-token-mean: each row's sum / its tokens, summed / sequences.
        seq-mean-token-sum: sum / sequences. seq-mean-token-sum-norm: sum / (sequences * length).
        unit-mean: sum / units (rows, pairs, groups). max: the largest value (weight 0 only).
    """

    name: str
    value: torch.Tensor
    mask: torch.Tensor | None = None
    how: str = attrs.field(default="token-mean", validator=attrs.validators.in_(REDUCTIONS))
    weight: float = 1.0
    length: int | None = None
    """The constant of seq-mean-token-sum-norm, in tokens."""

    def __attrs_post_init__(self) -> None:
        if self.how == "max" and self.weight:
            raise ValueError(
                f"term {self.name!r}: a maximum can be reported (weight=0), not trained on"
            )
        if self.how == "seq-mean-token-sum-norm" and not self.length:
            raise ValueError(
                f"term {self.name!r}: seq-mean-token-sum-norm needs length, the constant it divides by"
            )


class Loss(ABC):
    """The contract. Subclass it, declare what it reads and needs, and return terms.

    `__call__(batch, outputs)`: batch[name] is [B, T, ...] for token columns (padded with 0 on the right, and float ones
    0 wherever loss_mask is), [B, ...] for row columns, a list for objects; `loss_mask` is always there. outputs[name]
    likewise, with gradients: logprobs, entropy, values [B, T]; scores [B]; topk_logprobs [B, T, K] at the ids of column
    `topk_ids`.
    """

    reads: Sequence[str] = ()
    """Columns that it uses, beside loss_mask."""
    needs: Sequence[str] = ("logprobs",)
    """What it uses of the forward pass: logprobs, entropy, values, scores, topk_logprobs."""
    unit: str = "row"
    """"row", or the column ("pair", "group") whose equal values keep rows together over dp and micro-batches."""

    @abstractmethod
    def __call__(
        self, batch: Mapping[str, Any], outputs: Mapping[str, torch.Tensor]
    ) -> Term | Sequence[Term]: ...
