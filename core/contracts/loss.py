"""The contract of losses: an author declares columns and returns terms, which the core reduces.

A loss sees whole padded rows and returns terms. The core divides each term by counts that it takes
over the whole mini-batch (all ranks, all micro-batches) before the forward pass. So the result does
not depend on how rows are split. Rows (or units) without a token to train on are left out before
the forward pass: every row that a loss sees counts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch

REDUCTIONS = (
    "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm",
    "unit-mean", "max",
)  # fmt: skip
"""The ways to reduce a term to a number; Term says what each one computes."""


@attrs.frozen
class Counts:
    """The denominators of a mini-batch, counted over all ranks."""

    tokens: float
    """Tokens with loss_mask 1."""
    sequences: float
    """Rows with such a token."""
    units: float = 0.0
    """Units with such a token (see Loss.unit)."""


@attrs.frozen(eq=False)
class Term:
    """One addend of a loss; with weight 0 a metric that is only reported.

    value: [B, T] per token; with how="unit-mean" [U] per unit (with rows as units U = B).
    mask: [B, T], 1 where the value counts, by default the batch's loss_mask; for unit-mean [U], by
        default all ones. It masks the numerator alone: the denominator stays the mini-batch's.
    how: the reduction, with sums over masked values and counts over the mini-batch:
        token-mean               sum over all tokens / tokens
        seq-mean-token-mean      sum over rows of (the row's sum / the row's tokens) / sequences
        seq-mean-token-sum       sum over all tokens / sequences
        seq-mean-token-sum-norm  sum over all tokens / (sequences * length)
        unit-mean                sum over units (rows, pairs, groups of responses) / units
        max                      the largest value (with weight 0 only)
    """

    # The numbers
    name: str
    value: torch.Tensor
    mask: torch.Tensor | None = None

    # Their reduction to a number
    how: str = attrs.field(default="token-mean", validator=attrs.validators.in_(REDUCTIONS))
    weight: float = 1.0
    """Factor of the term in the loss; 0 only reports it."""
    length: int | None = None
    """The constant of seq-mean-token-sum-norm, in tokens."""

    def __attrs_post_init__(self) -> None:
        # The maximum over micro-batches is not a sum of their maxima, so it has no gradient here.
        if self.how == "max" and self.weight:
            raise ValueError(
                f"term {self.name!r}: a maximum can be reported (weight=0), not trained on"
            )
        if self.how == "seq-mean-token-sum-norm" and not self.length:
            raise ValueError(
                f"term {self.name!r}: seq-mean-token-sum-norm needs length, "
                "the constant it divides by"
            )


class Loss(ABC):
    """The contract: subclass it, declare the columns and outputs that the loss uses, return terms.

    `__call__(batch, outputs)` gets both as mappings from names. batch[name] is [B, T, ...] for
    per-token columns (0 on the right; floats are also 0 wherever loss_mask is), [B, ...] for
    per-row columns, and a list for objects; `loss_mask` is always in it. outputs[name] has
    gradients and the same shapes: logprobs, entropy and values [B, T]; scores [B]; topk_logprobs
    [B, T, K] at the ids of column `topk_ids`.
    """

    reads: Sequence[str] = ()
    """Columns that the loss reads, beside loss_mask."""
    needs: Sequence[str] = ("logprobs",)
    """Outputs of the forward pass that it needs: logprobs, entropy, values, scores,
    topk_logprobs."""
    unit: str = "row"
    """The unit that is never split over dp ranks or micro-batches: "row", or a column ("pair",
    "group") whose equal values keep rows together."""

    @abstractmethod
    def __call__(
        self, batch: Mapping[str, Any], outputs: Mapping[str, torch.Tensor]
    ) -> Term | Sequence[Term]:
        """Return the terms of the loss for these rows."""
