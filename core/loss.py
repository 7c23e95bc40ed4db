"""Losses: what an author declares and returns, and how the core reduces it.

A loss sees full padded rows and returns terms; the core divides each by counts of the whole mini-batch (all ranks, all
micro-batches), taken before the forward. So the result does not depend on how rows are split.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch

from hybridflow.core.metrics import Metrics

REDUCTIONS = (
    "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "unit-mean", "max",
)  # fmt: skip


@attrs.frozen
class Counts:
    """Of a mini-batch, over all ranks: tokens with loss_mask 1, rows that have one, and units (rows, pairs, groups)."""

    tokens: float
    sequences: float
    units: float = 0.0


@attrs.frozen(eq=False)
class Term:
    """One addend of a loss, or with weight 0 a figure to report.

    value: [B, T] per token, or [U] per unit (rows: U = B) with how="unit-mean".
    mask: [B, T] (or [U]) 1 where the value counts; default the batch's loss_mask. It is the numerator's: what it drops
        stays in the denominator, which is the mini-batch's loss_mask.
    how: token-mean: sum / tokens. seq-mean-token-mean: each row's sum / its tokens, summed / sequences.
        seq-mean-token-sum: sum / sequences. seq-mean-token-sum-norm: sum / (sequences * length). unit-mean: sum / units.
        max: the largest value (weight 0 only).
    """

    name: str
    value: torch.Tensor
    mask: torch.Tensor | None = None
    how: str = attrs.field(default="token-mean", validator=attrs.validators.in_(REDUCTIONS))
    weight: float = 1.0
    length: int | None = None
    """The constant of seq-mean-token-sum-norm, in tokens."""

    def __attrs_post_init__(self):
        if self.how == "max" and self.weight:
            raise ValueError(f"term {self.name!r}: a maximum can be reported (weight=0), not trained on")
        if self.how == "seq-mean-token-sum-norm" and not self.length:
            raise ValueError(f"term {self.name!r}: seq-mean-token-sum-norm needs length, the constant it divides by")


class Loss(ABC):
    """The contract. Subclass it, declare what it reads and needs, and return terms.

    `__call__(batch, outputs)`: batch[name] is [B, T, ...] for token columns (padded with 0 on the right), [B, ...] for
    row columns, a list for objects; `loss_mask` is always there. outputs[name] likewise, from the forward with gradients:
    logprobs, entropy, values [B, T]; scores [B]; topk_logprobs [B, T, K] at the ids of column `topk_ids`.
    """

    reads: Sequence[str] = ()
    """Columns that it uses, beside prompt_ids, response_ids and loss_mask."""
    needs: Sequence[str] = ("logprobs",)
    """What it uses of the forward pass: logprobs, entropy, values, scores, topk_logprobs."""
    unit: str = "row"
    """"row", or the column whose equal values keep rows together ("pair", "group"): never split by dp or micro-batches."""

    @abstractmethod
    def __call__(self, batch: Mapping[str, Any], outputs: Mapping[str, torch.Tensor]) -> Term | Sequence[Term]: ...


def reduce_terms(
    terms: Term | Sequence[Term], loss_mask: torch.Tensor, counts: Counts, local: Counts
) -> tuple[torch.Tensor, Metrics]:
    """This micro-batch's share of the loss (shares add up to it), and the terms as (sum, count) metrics.

    counts: of the whole mini-batch; local: of this micro-batch.
    """
    terms = [terms] if isinstance(terms, Term) else list(terms)
    total = loss_mask.new_zeros((), dtype=torch.float32)
    means: dict[str, tuple[float, float]] = {}
    maxima: dict[str, float] = {}
    for term in terms:
        mask = loss_mask if term.mask is None else term.mask
        value = term.value
        if term.how == "max":
            seen = value.detach()[mask.bool()]
            if seen.numel():
                maxima[term.name] = float(seen.max())
            continue
        if value.shape != (mask.shape if term.how != "unit-mean" or term.mask is not None else value.shape):
            raise ValueError(
                f"term {term.name!r}: value has shape {tuple(value.shape)} and mask {tuple(mask.shape)}; they must be equal"
            )
        if term.how == "unit-mean":
            share = (value if term.mask is None else value * mask).sum()
            whole, here = counts.units, local.units
        elif term.how == "token-mean":
            share, whole, here = _masked(value, mask).sum(), counts.tokens, local.tokens
        else:
            per_row = _masked(value, mask).sum(-1)
            if term.how == "seq-mean-token-mean":
                per_row = per_row / loss_mask.sum(-1).clamp(min=1)
            elif term.how == "seq-mean-token-sum-norm":
                per_row = per_row / float(term.length or 1)
            share, whole, here = per_row.sum(), counts.sequences, local.sequences
        means[term.name] = (float(share.detach()), here)
        if term.weight:
            total = total + term.weight * share / max(whole, 1.0)
    means["loss"] = (float(total.detach()), 0.0)
    return total, Metrics(means, maxima)


def _masked(value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """value * mask, and exactly 0 (not nan) where the mask is 0."""
    return torch.where(mask.bool(), value * mask, torch.zeros((), dtype=value.dtype, device=value.device))
