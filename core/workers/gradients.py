"""The path of an update on one rank: mini-batches to micro-batches, losses to gradients and metrics."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hybridflow.core.contracts.loss import Counts, Loss
from hybridflow.core.contracts.training import MicroBatch, TrainingBackend
from hybridflow.core.contracts.worker import RankContext
from hybridflow.core.values.batch import Batch
from hybridflow.core.values.columns import Column
from hybridflow.core.values.metrics import Metrics
from hybridflow.core.workers.micro_batch import (
    dummy_micro_batch,
    make_micro_batch,
    plan_micro_batches,
)
from hybridflow.core.workers.reduction import Tally, reduce_terms

BASE = ("prompt_ids", "response_ids", "loss_mask")
MISMATCH = ("rollout_logprobs", "weight_version")
"""Columns by which trainer and rollout engine are compared, where a batch has them."""


def loss_reads(pairs: Sequence[tuple[Batch, Loss]], **_: Any) -> Sequence[str]:
    """The columns that an update needs."""
    extra = {"topk_ids"} if any("topk_logprobs" in loss.needs for _, loss in pairs) else set()
    units = {loss.unit for _, loss in pairs} - {"row"}
    return [
        *BASE,
        *sorted({name for _, loss in pairs for name in loss.reads} | extra | units | {*MISMATCH}),
    ]


class LossPart:
    """One (mini-batch, loss) pair: this rank's rows, and its counts over all ranks once they are agreed."""

    def __init__(
        self,
        batch: Batch,
        loss: Loss,
        micro_batch_tokens: int,
        context: RankContext,
        extras: Collection[str] = (),
    ):
        """extras: columns that the backend reads beside ours, where the batch has them."""
        self.loss, self.context = loss, context
        self.prompts, self.responses, self.masks = (batch[name] for name in BASE)
        assert self.prompts.lengths is not None and self.responses.lengths is not None
        self.tokens = _row_tokens(self.masks)
        self.units = (
            None if loss.unit == "row" else np.asarray(torch.as_tensor(batch[loss.unit].values))
        )
        kept = self._kept_rows()
        lengths = (self.prompts.lengths + self.responses.lengths)[kept]
        units = None if self.units is None else self.units[kept]
        self.plan = [kept[rows] for rows in plan_micro_batches(lengths, micro_batch_tokens, units)]
        self.local = self._count(kept)
        self.total = self.local
        names = (*loss.reads, "loss_mask", *(n for n in MISMATCH if n in batch))
        self.columns = {name: batch[name] for name in dict.fromkeys(names)}
        self.topk = batch["topk_ids"] if "topk_logprobs" in loss.needs else None
        self.extras = {name: batch[name] for name in extras if name in batch}
        self.micros: list[MicroBatch] = []

    def _kept_rows(self) -> np.ndarray:
        """Rows with a token to train on, and the other rows of their units."""
        if self.units is None:
            return np.flatnonzero(self.tokens)
        return np.flatnonzero(np.isin(self.units, self.units[self.tokens > 0]))

    def _count(self, rows: np.ndarray) -> Counts:
        tokens = self.tokens[rows]
        units = len(rows) if self.units is None else len(np.unique(self.units[rows]))
        return Counts(float(tokens.sum()), float((tokens > 0).sum()), float(units))

    def make_micros(self, count: int) -> None:
        device, made = self.context.device, self.plan
        self.micros = [
            make_micro_batch(self.prompts, self.responses, rows, device, self.topk, self.extras)
            for rows in made
        ]
        topk = 0 if self.topk is None else int(torch.as_tensor(self.topk.values).shape[-1])
        self.micros += [dummy_micro_batch(device, topk) for _ in range(count - len(made))]

    def run(self, backend: TrainingBackend, temperature: float, train: bool) -> Tally:
        """Forward (and backward) of every micro-batch."""
        tally = Tally()

        def share(at: int, outputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
            if self.micros[at].dummy:
                return _nothing(outputs)
            rows = padded_rows(self.columns, self.plan[at], self.context.device)
            declared = {name: rows[name] for name in (*self.loss.reads, "loss_mask")}
            value, found = reduce_terms(
                self.loss(declared, outputs),
                rows["loss_mask"],
                self.total,
                self._count(self.plan[at]),
            )
            tally.extend(found)
            if "logprobs" in outputs and all(name in rows for name in MISMATCH):
                tally.extend(mismatch(rows, outputs["logprobs"], backend.version))
            if (
                train and not value.requires_grad
            ):  # every term had weight 0; the ranks' backwards must still meet
                return value + _nothing(outputs)
            return value

        if train:
            backend.forward_backward(self.micros, list(self.loss.needs), share, temperature)
        else:
            with torch.no_grad():
                for at, outputs in enumerate(
                    backend.forward(self.micros, list(self.loss.needs), temperature)
                ):
                    if outputs:  # only the last stage of a pipeline has them
                        share(at, outputs)
        return tally


def _nothing(outputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """0, with gradients that are 0."""
    return torch.stack([output.sum() * 0.0 for output in outputs.values()]).sum()


def agree(parts: Sequence[LossPart]) -> None:
    """The counts of every part over all dp ranks, and equally many micro-batches on each, by one all-reduce.

    At least one micro-batch: sharded models wait for one another.
    """
    context, size = parts[0].context, 3 + parts[0].context.layout.dp
    flat: list[float] = []
    for part in parts:
        forwards = [0.0] * context.layout.dp
        forwards[context.coords.dp] = float(len(part.plan))
        flat += [part.local.tokens, part.local.sequences, part.local.units, *forwards]
    summed = context.sum(flat)
    for at, part in enumerate(parts):
        mine = summed[at * size : (at + 1) * size]
        part.total = Counts(*mine[:3])
        part.make_micros(int(max(*mine[3:], 1)))


def mismatch(rows: Mapping[str, torch.Tensor], logprobs: torch.Tensor, version: int) -> Tally:
    """How far the trainer's logprobs are from the rollout engine's, over tokens that the present weights made.

    d = logprobs - rollout_logprobs. mismatch_mean: |d|; mismatch_kl: exp(d) - 1 - d (k3 of KL(rollout || trainer));
    mismatch_max_ratio: the largest exp(|d|).
    """
    d = logprobs.detach() - rows["rollout_logprobs"]
    mask = (rows["loss_mask"] > 0) & (rows["weight_version"] == version)
    d, count = torch.where(mask, d, 0.0), mask.sum()
    tally = Tally()
    tally.add("mismatch_mean", d.abs().sum(), count)
    tally.add("mismatch_kl", (d.exp() - 1 - d).sum(), count)
    tally.peak("mismatch_max_ratio", d.abs().exp(), mask)
    return tally


def loss_metrics(tallies: Sequence[Tally], context: RankContext) -> Metrics:
    """The metrics of all parts; `loss` is their sum, counted once, since the shares of the ranks add up to it."""
    together = Tally()
    for tally in tallies:
        together.extend(tally)
    metrics = together.metrics()
    total = metrics.means.get("loss", (0.0, 0.0))[0]
    metrics.means["loss"] = (total, 1.0 if context.coords.dp == 0 else 0.0)
    return metrics


def _row_tokens(masks: Column) -> np.ndarray:
    """Sum of loss_mask per row, float64 [rows]."""
    assert masks.lengths is not None
    rows = np.repeat(np.arange(masks.rows), masks.lengths)
    return np.bincount(rows, torch.as_tensor(masks.values).double().numpy(), minlength=masks.rows)


def padded_rows(
    columns: Mapping[str, Column], rows: np.ndarray, device: torch.device, width: int | None = None
) -> dict[str, Any]:
    """What a loss is called with: float columns in float32, masks as float32, integers as they are.

    Float columns of response tokens are 0 where loss_mask is 0: a nan there (tool output has no logprobs, say) would
    come back as a nan gradient, mask or not. width: of the padded rows, by default the longest.
    """
    mask = columns["loss_mask"].take(rows)
    hidden = torch.as_tensor(mask.values) == 0
    out: dict[str, Any] = {}
    for name, column in columns.items():
        taken = column.take(rows)
        if taken.kind == "object":
            out[name] = taken.values
            continue
        if taken.kind == "token":
            values = torch.as_tensor(taken.values)
            assert taken.lengths is not None and mask.lengths is not None
            if values.is_floating_point() and np.array_equal(taken.lengths, mask.lengths):
                values = values.masked_fill(hidden.view(-1, *(1,) * (values.dim() - 1)), 0)
            tensor = Column(values, taken.lengths).padded(width=width)
        else:
            tensor = torch.as_tensor(taken.values)
        out[name] = (
            tensor.float() if tensor.is_floating_point() or name == "loss_mask" else tensor
        ).to(device)
    return out
