"""Reduces the terms of a loss to its value and its metrics.

Every term is a sum over a count of the whole mini-batch, so that the result does not depend on how
rows are spread over ranks and micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hybridflow.core.contracts.loss import Counts, Term
from hybridflow.core.values.metrics import Metrics


class Tally:
    """(sum, count) pairs and maxima, as tensors on the device.

    `metrics` reads all of them with one synchronisation.
    """

    def __init__(self) -> None:
        # (name, sum, count) and (name, maximum), in the order in which they were added.
        self._sums: list[tuple[str, torch.Tensor, torch.Tensor | float]] = []
        self._maxima: list[tuple[str, torch.Tensor]] = []

    def add(self, name: str, total: torch.Tensor, count: torch.Tensor | float) -> None:
        """Add to a figure that is reported as sum / count."""
        self._sums.append((name, total.detach(), count))

    def peak(self, name: str, value: torch.Tensor, mask: torch.Tensor) -> None:
        """Record the largest value where mask is true; nothing if there is none."""
        if value.numel():
            visible = value.detach().float().masked_fill(~mask, -torch.inf)
            self._maxima.append((name, visible.max()))

    def extend(self, other: Tally) -> None:
        """Add everything that another tally has."""
        self._sums += other._sums
        self._maxima += other._maxima

    def metrics(self) -> Metrics:
        """Return the sums and counts added up by name, and the largest of the maxima."""
        scalars: list[torch.Tensor] = []
        for _, total, count in self._sums:
            scalars += [value for value in (total, count) if isinstance(value, torch.Tensor)]
        scalars += [value for _, value in self._maxima]

        # One transfer to the host; `numbers` then yields them in the order of their addition.
        numbers = iter(
            torch.stack([value.double() for value in scalars]).tolist() if scalars else ()
        )
        means: dict[str, tuple[float, float]] = {}
        for name, _, count in self._sums:
            total = next(numbers)
            count = next(numbers) if isinstance(count, torch.Tensor) else count
            total_before, count_before = means.get(name, (0.0, 0.0))
            means[name] = (total_before + total, count_before + count)

        # Minus infinity: no value was visible.
        maxima: dict[str, float] = {}
        for name, _ in self._maxima:
            value = next(numbers)
            if value != -torch.inf:
                maxima[name] = max(value, maxima.get(name, value))
        return Metrics(means, maxima)


def reduce_terms(
    terms: Term | Sequence[Term], loss_mask: torch.Tensor, counts: Counts, local: Counts
) -> tuple[torch.Tensor, Tally]:
    """Return this micro-batch's share of the loss (shares add up to it), and a tally of the terms.

        share = sum over terms of  weight * (numerator over this micro-batch) / (mini-batch's count)

    loss_mask: float32 [B, T]; counts: of the whole mini-batch; local: of this micro-batch. The
    figure `loss` has count 0, since shares add up and are not averaged. Raises ValueError when the
    shapes of a term's value and mask differ.
    """
    # A tensor on the loss's device, also where no term has a weight.
    total = loss_mask.new_zeros(())
    tally = Tally()
    for term in [terms] if isinstance(terms, Term) else terms:
        # A maximum is a figure only, and no part of the loss.
        if term.how == "max":
            tally.peak(term.name, term.value, _mask_of(term, loss_mask).bool())
            continue

        # The figure is averaged over micro-batches by their own counts; the loss is divided by the
        # mini-batch's, so that the gradients of all micro-batches add up to its gradient.
        numerator, count, local_count = _share(term, loss_mask, counts, local)
        tally.add(term.name, numerator, local_count)
        if term.weight:
            total = total + numerator * (term.weight / max(count, 1.0))
    tally.add("loss", total, 0.0)
    return total, tally


def _share(
    term: Term, loss_mask: torch.Tensor, counts: Counts, local: Counts
) -> tuple[torch.Tensor, float, float]:
    """Return (numerator, the mini-batch's count, this micro-batch's count), by the term's `how`.

    With m the mask, the numerator is the sum over rows of: sum_t m_t v_t for token-mean and
    seq-mean-token-sum; that over sum_t loss_mask_t for seq-mean-token-mean; that over `length` for
    seq-mean-token-sum-norm; v for unit-mean.
    """
    masked = _masked(term.value, _mask_of(term, loss_mask))
    if term.how == "unit-mean":
        return masked.sum(), counts.units, local.units
    if term.how == "token-mean":
        return masked.sum(), counts.tokens, local.tokens

    # The others are means over sequences.
    per_row = masked.sum(-1)
    if term.how == "seq-mean-token-mean":
        per_row = per_row / loss_mask.sum(-1).clamp(min=1)
    elif term.how == "seq-mean-token-sum-norm":
        per_row = per_row / float(term.length or 1)
    return per_row.sum(), counts.sequences, local.sequences


def _mask_of(term: Term, loss_mask: torch.Tensor) -> torch.Tensor:
    """Return the term's own mask, loss_mask, or ones for a value per unit. Raises ValueError."""
    mask = loss_mask if term.mask is None else term.mask
    per_unit = term.how == "unit-mean" or (term.how == "max" and term.value.dim() == 1)
    if term.mask is None and per_unit:
        mask = torch.ones_like(term.value)

    expected = 1 if term.how == "unit-mean" else mask.dim()
    if term.value.shape != mask.shape or term.value.dim() != expected:
        raise ValueError(
            f"term {term.name!r} ({term.how}): value has shape {tuple(term.value.shape)} and "
            f"mask {tuple(mask.shape)}; "
            f"they must be equal, {'[U]' if term.how == 'unit-mean' else '[B, T]'}"
        )
    return mask


def _masked(value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return value * mask, which is exactly 0 (not nan) where the mask is 0."""
    # nan * 0 is nan, so a product with the mask alone would not do.
    zero = torch.zeros((), dtype=value.dtype, device=value.device)
    return torch.where(mask.bool(), value, zero) * mask
