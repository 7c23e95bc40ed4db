"""How the terms of a loss become its value and its figures: sums over counts of the whole mini-batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hybridflow.core.contracts.loss import Counts, Term
from hybridflow.core.values.metrics import Metrics


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
        scalars = [
            t
            for _, total, count in self._sums
            for t in (total, count)
            if isinstance(t, torch.Tensor)
        ]
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


def _share(
    term: Term, loss_mask: torch.Tensor, counts: Counts, local: Counts
) -> tuple[torch.Tensor, float, float]:
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
    if term.mask is None and (
        term.how == "unit-mean" or (term.how == "max" and term.value.dim() == 1)
    ):
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
    return (
        torch.where(mask.bool(), value, torch.zeros((), dtype=value.dtype, device=value.device))
        * mask
    )
