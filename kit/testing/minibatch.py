"""Random ragged mini-batches, and a loss on them as the core computes it.

MiniBatch  --  plan: rows of each micro-batch
                 |  per micro-batch: pad the columns and outputs, call the loss, reduce its terms
                 v
               Result: the loss, its gradients to the outputs, its metrics, and what it used
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, pairwise
from typing import Any

import attrs
import numpy as np
import torch

from hybridflow.core.contracts.loss import Counts, Loss, Term
from hybridflow.core.values.columns import Column, as_column
from hybridflow.core.workers.gradients import padded_rows
from hybridflow.core.workers.reduction import reduce_terms
from hybridflow.kit.testing.random_columns import RowShapes, standard_output


class Undeclared(Exception):
    """A loss asked for a column or an output that it does not declare."""

    def __init__(self, what: str, field: str):
        self.what = what
        self.field = field
        super().__init__(f"{what} is not in `{field}`")


class Declared(dict):
    """The columns or outputs that a loss may use; it remembers which were used.

    Asking for another one raises Undeclared, by `in` and `get` too: an optional column is never
    there in a run.
    """

    def __init__(self, values: dict[str, Any], kind: str, field: str):
        super().__init__(values)
        self.kind = kind
        self.field = field
        self.used: set[str] = set()

    def __getitem__(self, name):
        self.used.add(name)
        if not dict.__contains__(self, name):
            raise Undeclared(f"{self.kind}[{name!r}]", self.field)
        return super().__getitem__(name)

    def __contains__(self, name):
        self[name]  # raises for a name that is not declared
        return True

    def get(self, name, default=None):
        """Return the value of `name`; there is no default. Raises Undeclared."""
        return self[name]


@attrs.frozen(eq=False)
class Result:
    """A loss over all micro-batches of a plan."""

    total: float
    """The loss: the sum of its terms times their weights."""
    gradients: dict[str, list[torch.Tensor]]
    """Output -> the gradient of `total`, one tensor per row without padding."""
    term_gradients: dict[str, list[torch.Tensor]]
    """Term -> the gradient of its sum at weight 1, one tensor per output and row."""
    metrics: dict[str, float]
    """The reported figures, merged over the micro-batches."""
    read: set[str]
    """Columns that were read, loss_mask left out."""
    needed: set[str]
    """Outputs that were used."""
    changed: set[str]
    """Columns that the loss changed in place."""


@attrs.frozen(eq=False)
class MiniBatch:
    """The columns and outputs of one optimizer step."""

    shape: RowShapes
    columns: dict[str, Column]
    outputs: dict[str, list[torch.Tensor]]
    """Output -> one tensor per row without padding, [T, ...]; of scores, []."""

    @classmethod
    def make(
        cls,
        loss: Loss,
        shape: RowShapes,
        columns: Callable[[str, RowShapes], Any],
    ) -> MiniBatch:
        """Return random columns and outputs that the loss declares.

        `columns` makes one column by its name, as `standard_column` does.
        """
        names = dict.fromkeys(("loss_mask", *loss.reads))
        if loss.unit != "row":
            names[loss.unit] = None

        # Top-k log-probabilities are asked for at given ids.
        made = {name: as_column(columns(name, shape)) for name in names}
        if "topk_logprobs" in loss.needs and "topk_ids" not in made:
            made["topk_ids"] = as_column(columns("topk_ids", shape))
        outputs = {name: standard_output(name, shape, made) for name in loss.needs}
        return cls(shape, made, outputs)

    @property
    def masks(self) -> list[torch.Tensor]:
        """The rows of loss_mask, bool [T]."""
        return [mask.bool() for mask in self.columns["loss_mask"]]

    def units_rows(self) -> list[int]:
        """Return the numbers of all rows: the only micro-batch of the plan in one piece."""
        return list(range(self.shape.rows))

    def plans(self) -> Iterator[list[list[int]]]:
        """Yield splits that keep units whole: each alone, in halves, backwards, two at random."""
        numbers = np.unique(self.shape.units)
        units = [np.flatnonzero(self.shape.units == number).tolist() for number in numbers]
        half = len(units) // 2
        yield units
        yield [_rows(units[:half]), _rows(units[half:])]
        yield [_rows(units[::-1])]

        # Two random plans: the units shuffled, and cut at three random places.
        for seed in (1, 2):
            order = np.random.default_rng(seed).permutation(len(units)).tolist()
            cuts = sorted({0, len(units), *(order[:3])})
            shuffled = [units[i] for i in order]
            yield [_rows(shuffled[start:stop]) for start, stop in pairwise(cuts)]

    def with_garbage(self, value: float, column_value: float) -> MiniBatch:
        """Return a copy with other numbers wherever loss_mask is 0.

        They are `value` in the outputs but scores, and `column_value` in the float columns per
        token.
        """
        masks = self.masks
        hidden = ~torch.cat(masks)
        # Integer columns, ids for instance, must stay in their range.
        columns = {}
        for name, column in self.columns.items():
            values = column.values
            if (
                column.kind == "token"
                and isinstance(values, torch.Tensor)
                and values.is_floating_point()
            ):
                values = values.clone()
                values[hidden] = column_value
            columns[name] = Column(values, column.lengths)

        # Scores are per row: no token's mask hides one.
        outputs = {}
        for name, rows in self.outputs.items():
            outputs[name] = rows
            if name != "scores":
                pairs = zip(rows, masks, strict=True)
                outputs[name] = [_replaced(row, ~mask, value) for row, mask in pairs]
        return attrs.evolve(self, columns=columns, outputs=outputs)

    def with_column(self, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> MiniBatch:
        """Return a copy in which `change` was applied to the values of one column."""
        column = self.columns[name]
        changed = Column(change(torch.as_tensor(column.values)), column.lengths)
        return attrs.evolve(self, columns={**self.columns, name: changed})

    def with_outputs_moved(self, by: float) -> MiniBatch:
        """Return a copy whose outputs lie `by` away from where they were; entropy stays.

        Logprobs are at most 0: where `by` is positive, the old ones move down instead.
        """
        if by <= 0:
            moved = {
                name: _moved(rows, by) for name, rows in self.outputs.items() if name != "entropy"
            }
            return attrs.evolve(self, outputs={**self.outputs, **moved})

        mini = self
        for name in self.columns:
            if name.endswith("logprobs"):
                mini = mini.with_column(name, lambda values: values - by)
        moved = {
            name: _moved(rows, by)
            for name, rows in self.outputs.items()
            if name in ("values", "scores")
        }
        return attrs.evolve(mini, outputs={**mini.outputs, **moved})


def _rows(units: Sequence[Sequence[int]]) -> list[int]:
    return list(chain.from_iterable(units))


def _moved(rows: Sequence[torch.Tensor], by: float) -> list[torch.Tensor]:
    return [row + by for row in rows]


def _replaced(row: torch.Tensor, where: torch.Tensor, value: float) -> torch.Tensor:
    """Return a copy of a row [T, ...] with `value` where the bool tensor [T] is true."""
    row = row.clone()
    row[where] = value
    return row


def count(masks: Sequence[torch.Tensor], units: np.ndarray) -> Counts:
    """Return the tokens with mask 1, and the rows and units that have one.

    `masks` has bool [T] per row, `units` is int64 [rows].
    """
    per_row = [float(mask.sum()) for mask in masks]
    present = np.array([tokens > 0 for tokens in per_row], dtype=bool)
    units_present = np.unique(units[present])
    return Counts(sum(per_row), float(present.sum()), float(len(units_present)))


def evaluate(
    loss: Loss,
    mini: MiniBatch,
    plan: Sequence[Sequence[int]],
    extra: int = 0,
) -> Result:
    """Return the loss over the micro-batches of `plan`, each a list of rows.

    A micro-batch is padded to its longest row and `extra` columns more. Raises Undeclared.
    """
    leaves = {name: _leaves(rows) for name, rows in mini.outputs.items()}
    flat = list(chain.from_iterable(leaves.values()))
    # The denominators are those of the whole mini-batch, however it is split.
    counts = count(mini.masks, mini.shape.units)

    # Sums over the micro-batches.
    total = torch.zeros(())
    figures = []
    sums: dict[str, torch.Tensor] = {}
    read: set[str] = set()
    needed: set[str] = set()
    changed: set[str] = set()

    for rows in plan:
        # Pad this micro-batch's columns and outputs.
        index = np.asarray(rows, dtype=np.int64)
        width = int(mini.shape.lengths[index].max()) + extra
        batch = Declared(_padded(mini, loss, index, width), "batch", "reads")
        stacked = {name: _stacked(leaf, rows, width) for name, leaf in leaves.items()}
        outputs = Declared(stacked, "outputs", "needs")

        # Call the loss, and see which columns it wrote to.
        before = {
            name: values.clone()
            for name, values in batch.items()
            if isinstance(values, torch.Tensor)
        }
        returned = loss(batch, outputs)
        terms = [returned] if isinstance(returned, Term) else list(returned)
        for name, values in before.items():
            if not torch.equal(values, dict.__getitem__(batch, name)):
                changed.add(name)

        # Reduce its terms: together, and each one that is trained on by itself.
        mask = dict.__getitem__(batch, "loss_mask")
        masks = mini.masks
        local = count([masks[row] for row in rows], mini.shape.units[index])
        share, metrics = reduce_terms(terms, mask, counts, local)
        total = total + share
        figures.append(metrics)

        # A term of weight 0 is only reported.
        for term in terms:
            if term.weight:
                unweighted = attrs.evolve(term, weight=1.0)
                one, _ = reduce_terms(unweighted, mask, counts, local)
                sums[term.name] = sums.get(term.name, torch.zeros(())) + one
        read |= batch.used - {"loss_mask"}
        needed |= outputs.used

    return Result(
        float(total.detach()),
        _by_row(leaves, _gradients(total, flat)),
        {name: _gradients(value, flat) for name, value in sums.items()},
        _values(figures),
        read,
        needed,
        changed,
    )


def _leaves(rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies of the rows by which the loss is differentiated."""
    return [row.clone().requires_grad_() for row in rows]


def _padded(
    mini: MiniBatch,
    loss: Loss,
    rows: np.ndarray,
    width: int,
) -> dict[str, Any]:
    """Return the declared columns as the core gives them to a loss, [B, width] per token."""
    names = dict.fromkeys((*loss.reads, "loss_mask"))
    columns = {name: mini.columns[name] for name in names}
    return padded_rows(columns, rows, torch.device("cpu"), width)


def _stacked(
    leaves: Sequence[torch.Tensor],
    rows: Sequence[int],
    width: int,
) -> torch.Tensor:
    """Return an output of these rows: [B] of numbers, else [B, width, ...] filled with 0."""
    chosen = [leaves[row] for row in rows]
    if chosen[0].dim() == 0:
        return torch.stack(chosen)

    # Padded by hand, so that gradients flow back to the leaves.
    filled = []
    for leaf in chosen:
        padding = leaf.new_zeros((width - len(leaf), *leaf.shape[1:]))
        filled.append(torch.cat([leaf, padding]))
    return torch.stack(filled)


def _gradients(value: torch.Tensor, flat: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the gradient of a number to each leaf, zeros where it does not depend on it."""
    # A loss need not depend on the outputs at all.
    if not value.requires_grad:
        return [torch.zeros_like(leaf) for leaf in flat]

    gradients = torch.autograd.grad(value, flat, retain_graph=True, allow_unused=True)
    pairs = zip(gradients, flat, strict=True)
    return [torch.zeros_like(leaf) if gradient is None else gradient for gradient, leaf in pairs]


def _by_row(
    leaves: dict[str, list[torch.Tensor]], flat: list[torch.Tensor]
) -> dict[str, list[torch.Tensor]]:
    """Return the gradients `flat`, which lie one after the other, in the form of the leaves."""
    gradients = {}
    start = 0
    for name, rows in leaves.items():
        gradients[name] = flat[start : start + len(rows)]
        start += len(rows)
    return gradients


def _values(figures: list[Any]) -> dict[str, float]:
    """Return the metrics over all micro-batches."""
    from hybridflow.core.values.metrics import Metrics

    merged = Metrics.merge(
        figure if isinstance(figure, Metrics) else figure.metrics() for figure in figures
    )
    return merged.values()
