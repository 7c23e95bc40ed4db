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

from hybridflow.core.metrics import Metrics

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

    def __attrs_post_init__(self):
        if self.how == "max" and self.weight:
            raise ValueError(f"term {self.name!r}: a maximum can be reported (weight=0), not trained on")
        if self.how == "seq-mean-token-sum-norm" and not self.length:
            raise ValueError(f"term {self.name!r}: seq-mean-token-sum-norm needs length, the constant it divides by")


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
    def __call__(self, batch: Mapping[str, Any], outputs: Mapping[str, torch.Tensor]) -> Term | Sequence[Term]: ...


class Tally:
    """(sum, count) pairs and maxima as tensors on the device; `metrics` reads all of them with one synchronisation."""

    def __init__(self) -> None:
        self._sums: list[tuple[str, torch.Tensor, torch.Tensor | float]] = []
        self._maxima: list[tuple[str, torch.Tensor]] = []

    def add(self, name: str, total: torch.Tensor, count: torch.Tensor | float) -> None:
        self._sums.append((name, total.detach(), count))

    def peak(self, name: str, value: torch.Tensor, mask: torch.Tensor) -> None:
        """The largest value where mask is true; nothing if there is none."""
        if value.numel():
            self._maxima.append((name, value.detach().float().masked_fill(~mask, -torch.inf).max()))

    def extend(self, other: Tally) -> None:
        self._sums += other._sums
        self._maxima += other._maxima

    def metrics(self) -> Metrics:
        scalars = [t for _, total, count in self._sums for t in (total, count) if isinstance(t, torch.Tensor)]
        scalars += [value for _, value in self._maxima]
        read = iter(torch.stack([t.double() for t in scalars]).tolist() if scalars else ())
        means: dict[str, tuple[float, float]] = {}
        for name, _, count in self._sums:
            total = next(read)
            more = next(read) if isinstance(count, torch.Tensor) else count
            had = means.get(name, (0.0, 0.0))
            means[name] = (had[0] + total, had[1] + more)
        maxima: dict[str, float] = {}
        for name, _ in self._maxima:
            value = next(read)
            if value != -torch.inf:
                maxima[name] = max(value, maxima.get(name, value))
        return Metrics(means, maxima)


def reduce_terms(
    terms: Term | Sequence[Term], loss_mask: torch.Tensor, counts: Counts, local: Counts
) -> tuple[torch.Tensor, Tally]:
    """This micro-batch's share of the loss (shares add up to it), and a tally of the terms.

    loss_mask: float32 [B, T]; counts: of the whole mini-batch; local: of this micro-batch. Figure `loss` has count 0:
    shares add up, and are not averaged. Raises ValueError when a term's shapes differ.
    """
    total = loss_mask.new_zeros(())
    tally = Tally()
    for term in [terms] if isinstance(terms, Term) else terms:
        if term.how == "max":
            tally.peak(term.name, term.value, _mask_of(term, loss_mask).bool())
            continue
        share, whole, here = _share(term, loss_mask, counts, local)
        tally.add(term.name, share, here)
        if term.weight:
            total = total + share * (term.weight / max(whole, 1.0))
    tally.add("loss", total, 0.0)
    return total, tally


def _share(term: Term, loss_mask: torch.Tensor, counts: Counts, local: Counts) -> tuple[torch.Tensor, float, float]:
    """(numerator, the mini-batch's count, this micro-batch's count)."""
    masked = _masked(term.value, _mask_of(term, loss_mask))
    if term.how == "unit-mean":
        return masked.sum(), counts.units, local.units
    if term.how == "token-mean":
        return masked.sum(), counts.tokens, local.tokens
    per_row = masked.sum(-1)
    if term.how == "seq-mean-token-mean":
        per_row = per_row / loss_mask.sum(-1).clamp(min=1)
    elif term.how == "seq-mean-token-sum-norm":
        per_row = per_row / float(term.length or 1)
    return per_row.sum(), counts.sequences, local.sequences


def _mask_of(term: Term, loss_mask: torch.Tensor) -> torch.Tensor:
    mask = loss_mask if term.mask is None else term.mask
    if term.mask is None and (term.how == "unit-mean" or (term.how == "max" and term.value.dim() == 1)):
        mask = torch.ones_like(term.value)  # of units
    expected = 1 if term.how == "unit-mean" else mask.dim()
    if term.value.shape != mask.shape or term.value.dim() != expected:
        raise ValueError(
            f"term {term.name!r} ({term.how}): value has shape {tuple(term.value.shape)} and mask {tuple(mask.shape)}; "
            f"they must be equal, {'[U]' if term.how == 'unit-mean' else '[B, T]'}"
        )
    return mask


def _masked(value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """value * mask, and exactly 0 (not nan) where the mask is 0."""
    return torch.where(mask.bool(), value, torch.zeros((), dtype=value.dtype, device=value.device)) * mask
