"""Random ragged mini-batches, and a loss on them as the core computes it: over any split, with gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import attrs
import numpy as np
import torch

from hybridflow.core.contracts.loss import Counts, Loss, Term
from hybridflow.core.values.columns import Column, as_column
from hybridflow.core.workers.gradients import padded_rows
from hybridflow.core.workers.reduction import reduce_terms
from hybridflow.kit.testing.random_columns import Shape, standard_output


class Undeclared(Exception):
    """A loss asked for what it does not declare."""

    def __init__(self, what: str, field: str):
        self.what, self.field = what, field
        super().__init__(f"{what} is not in `{field}`")


class Declared(dict):
    """What a loss may use; remembers what it used."""

    def __init__(self, values: dict[str, Any], kind: str, field: str):
        super().__init__(values)
        self.kind, self.field = kind, field
        self.used: set[str] = set()

    def __getitem__(self, name):
        self.used.add(name)
        if not dict.__contains__(self, name):
            raise Undeclared(f"{self.kind}[{name!r}]", self.field)
        return super().__getitem__(name)

    def __contains__(self, name):
        self[name]
        return True

    def get(self, name, default=None):
        return self[name]


@attrs.frozen(eq=False)
class Result:
    """What a loss gave, over all micro-batches."""

    total: float
    gradients: dict[str, list[torch.Tensor]]
    """Output -> per row, without padding."""
    term_gradients: dict[str, list[torch.Tensor]]
    """Term -> of its sum, all outputs and rows one after the other."""
    metrics: dict[str, float]
    read: set[str]
    needed: set[str]
    changed: set[str]


@attrs.frozen(eq=False)
class MiniBatch:
    """The columns and outputs of one optimizer step."""

    shape: Shape
    columns: dict[str, Column]
    outputs: dict[str, list[torch.Tensor]]

    @classmethod
    def make(cls, loss: Loss, shape: Shape, columns: Callable[[str, Shape], Any]) -> MiniBatch:
        names = dict.fromkeys(("loss_mask", *loss.reads))
        if loss.unit != "row":
            names[loss.unit] = None
        made = {name: as_column(columns(name, shape)) for name in names}
        if "topk_logprobs" in loss.needs and "topk_ids" not in made:
            made["topk_ids"] = as_column(columns("topk_ids", shape))
        return cls(shape, made, {name: standard_output(name, shape, made) for name in loss.needs})

    @property
    def masks(self) -> list[torch.Tensor]:
        """bool [T] per row."""
        return [m.bool() for m in self.columns["loss_mask"]]

    def units_rows(self) -> list[int]:
        return list(range(self.shape.rows))

    def plans(self) -> Iterator[list[list[int]]]:
        """Splits that keep units whole: each alone, in halves, backwards, and two at random."""
        units = [
            np.flatnonzero(self.shape.units == u).tolist() for u in np.unique(self.shape.units)
        ]
        yield units
        yield [_rows(units[: len(units) // 2]), _rows(units[len(units) // 2 :])]
        yield [_rows(units[::-1])]
        for seed in (1, 2):
            order = np.random.default_rng(seed).permutation(len(units)).tolist()
            cuts = sorted({0, len(units), *(order[:3])})
            yield [_rows([units[i] for i in order[a:b]]) for a, b in pairwise(cuts)]

    def with_garbage(self, value: float, column_value: float) -> MiniBatch:
        """Other numbers wherever loss_mask is 0: in the outputs, and in the float columns per token."""
        masks = self.masks
        hidden = ~torch.cat(masks)
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
        outputs = {}
        for name, rows in self.outputs.items():
            outputs[name] = (
                rows
                if name == "scores"
                else [_replaced(r, ~m, value) for r, m in zip(rows, masks, strict=True)]
            )
        return attrs.evolve(self, columns=columns, outputs=outputs)

    def with_column(self, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> MiniBatch:
        column = self.columns[name]
        changed = Column(change(torch.as_tensor(column.values)), column.lengths)
        return attrs.evolve(self, columns={**self.columns, name: changed})

    def with_outputs_moved(self, by: float) -> MiniBatch:
        """Outputs `by` away from where they were; logprobs stay below 0, so the old ones move where it is positive."""
        if by <= 0:
            moved = {
                n: [r + by for r in rows] for n, rows in self.outputs.items() if n != "entropy"
            }
            return attrs.evolve(self, outputs={**self.outputs, **moved})
        mini = self
        for name in self.columns:
            if name.endswith("logprobs"):
                mini = mini.with_column(name, lambda values: values - by)
        moved = {
            n: [r + by for r in rows]
            for n, rows in self.outputs.items()
            if n in ("values", "scores")
        }
        return attrs.evolve(mini, outputs={**mini.outputs, **moved})


def _rows(units: Sequence[Sequence[int]]) -> list[int]:
    return [row for unit in units for row in unit]


def _replaced(row: torch.Tensor, where: torch.Tensor, value: float) -> torch.Tensor:
    row = row.clone()
    row[where] = value
    return row


def count(masks: Sequence[torch.Tensor], units: np.ndarray) -> Counts:
    per_row = [float(m.sum()) for m in masks]
    present = np.array([n > 0 for n in per_row], dtype=bool)
    return Counts(sum(per_row), float(present.sum()), float(len(np.unique(units[present]))))


def evaluate(loss: Loss, mini: MiniBatch, plan: Sequence[Sequence[int]], extra: int = 0) -> Result:
    """The loss over the micro-batches of `plan`, each padded to its longest row and `extra` columns more."""
    leaves = {n: [r.clone().requires_grad_() for r in rows] for n, rows in mini.outputs.items()}
    flat = [leaf for rows in leaves.values() for leaf in rows]
    counts = count(mini.masks, mini.shape.units)
    total, figures = torch.zeros(()), []
    sums: dict[str, torch.Tensor] = {}
    read: set[str] = set()
    needed: set[str] = set()
    changed: set[str] = set()
    for rows in plan:
        index = np.asarray(rows, dtype=np.int64)
        width = int(mini.shape.lengths[index].max()) + extra
        batch = Declared(_padded(mini, loss, index, width), "batch", "reads")
        outputs = Declared(
            {n: _stacked([r[i] for i in rows], width) for n, r in leaves.items()},
            "outputs",
            "needs",
        )
        before = {n: v.clone() for n, v in batch.items() if isinstance(v, torch.Tensor)}
        terms = loss(batch, outputs)
        terms = [terms] if isinstance(terms, Term) else list(terms)
        changed |= {n for n, v in before.items() if not torch.equal(v, dict.__getitem__(batch, n))}
        mask = dict.__getitem__(batch, "loss_mask")
        local = count([mini.masks[i] for i in rows], mini.shape.units[index])
        share, metrics = reduce_terms(terms, mask, counts, local)
        total = total + share
        figures.append(metrics)
        for term in terms:
            if term.weight:
                one, _ = reduce_terms(attrs.evolve(term, weight=1.0), mask, counts, local)
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


def _padded(mini: MiniBatch, loss: Loss, rows: np.ndarray, width: int) -> dict[str, Any]:
    """What the core gives a loss: the declared columns."""
    names = dict.fromkeys((*loss.reads, "loss_mask"))
    return padded_rows(
        {name: mini.columns[name] for name in names}, rows, torch.device("cpu"), width
    )


def _stacked(rows: list[torch.Tensor], width: int) -> torch.Tensor:
    """[B] of numbers, else [B, width, ...] filled with 0."""
    if rows[0].dim() == 0:
        return torch.stack(rows)
    filled = [torch.cat([r, r.new_zeros((width - len(r), *r.shape[1:]))]) for r in rows]
    return torch.stack(filled)


def _gradients(value: torch.Tensor, flat: list[torch.Tensor]) -> list[torch.Tensor]:
    if not value.requires_grad:
        return [torch.zeros_like(leaf) for leaf in flat]
    found = torch.autograd.grad(value, flat, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(found, flat, strict=True)]


def _by_row(
    leaves: dict[str, list[torch.Tensor]], flat: list[torch.Tensor]
) -> dict[str, list[torch.Tensor]]:
    gradients = iter(flat)
    return {name: [next(gradients) for _ in rows] for name, rows in leaves.items()}


def _values(figures: list[Any]) -> dict[str, float]:
    """Metrics over all micro-batches."""
    from hybridflow.core.values.metrics import Metrics

    merged = Metrics.merge(f if isinstance(f, Metrics) else f.metrics() for f in figures)
    return merged.values()
