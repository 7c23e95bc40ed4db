"""Computes an update on one rank, from mini-batches and losses to gradients and metrics.

(mini-batch, loss) pairs        LossPart: this rank's rows, planned into micro-batches
    |  agree                    one all-reduce: counts of the whole mini-batches, and equally
    |                           many micro-batches on every data parallel rank
    v  LossPart.run             per micro-batch: outputs -> terms -> share of the loss -> backward
gradients and tallies
    v  loss_metrics
Metrics of this rank
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hybridflow.core.contracts.loss import Counts, Loss, Term
from hybridflow.core.contracts.training import MicroBatch, Packing, TrainingBackend
from hybridflow.core.contracts.worker import RankContext
from hybridflow.core.errors import HybridFlowError
from hybridflow.core.processes.page import moved
from hybridflow.core.values.batch import Batch
from hybridflow.core.values.branches import BRANCHES, sequences
from hybridflow.core.values.columns import Column
from hybridflow.core.values.metrics import Metrics
from hybridflow.core.workers.micro_batch import (
    dummy_micro_batch,
    make_micro_batch,
    plan_micro_batches,
)
from hybridflow.core.workers.reduction import Tally, reduce_terms

BASE = ("prompt_ids", "response_ids", "loss_mask")
"""Columns that every update needs."""
MISMATCH = ("rollout_logprobs", "weight_version")
"""Columns by which trainer and rollout engine are compared, where a batch has them."""
LAG = "lag"
"""By how many steps the weights that made a token are behind those of its step, int8 per token, or
per row where they are the same; where steps are generated ahead."""
WEIGHT = "importance_weight"
"""The metric of old/rollout, per token; its square is another, of which the controller makes the
effective sample size."""
OLDEST = "oldest_version"
"""The version of the oldest weights that made a token of an update, negated, for the controller."""
RECORD_ID = "record_id"
"""A row's number among those whose logprobs are recorded, int32; -1: it is not recorded."""
MISMATCH_MEAN = "mismatch_mean"
"""The metric that is compared with a limit."""


def loss_reads(pairs: Sequence[tuple[Batch, Loss]], **_: Any) -> Sequence[str]:
    """Return the columns that an update with these (mini-batch, loss) pairs reads."""
    names = {*MISMATCH}
    for _batch, loss in pairs:
        names.update(loss.reads)
        if "topk_logprobs" in loss.needs:
            names.add("topk_ids")
        if loss.unit != "row":
            names.add(loss.unit)
    return [*BASE, BRANCHES, RECORD_ID, LAG, *sorted(names)]


class LossPart:
    """One (mini-batch, loss) pair on one rank.

    It holds this rank's rows, and from `agree` on the counts over all ranks.
    """

    def __init__(
        self,
        batch: Batch,
        loss: Loss,
        micro_batch_tokens: int,
        context: RankContext,
        extras: Collection[str] = (),
        packing: Packing = Packing.PADDED,
        keeps_cache: bool = False,
    ):
        """Plan the micro-batches of at most `micro_batch_tokens` tokens, padding included.

        extras: columns that the backend reads beside the framework's, where the batch has them.
        packing: how the backend takes rows. keeps_cache: whether tokens of the present weights may
        come after keys and values of older ones, so that their logprobs are not to be compared.
        """
        self.loss = loss
        # Where rows branch, their sequences are the rows of this part.
        self.sequences = sequences(batch)
        if self.sequences is not None:
            batch = self.sequences.batch
        self.keeps_cache = keeps_cache
        self.context = context
        self.packing = packing
        self.prompts, self.responses, self.masks = (batch[name] for name in BASE)
        assert self.prompts.lengths is not None and self.responses.lengths is not None

        # For each row: its number of tokens to train on, and its unit.
        self.tokens = _row_tokens(self.masks)
        self.units: np.ndarray | None = None
        if loss.unit != "row":
            self.units = np.asarray(torch.as_tensor(batch[loss.unit].values))

        # Rows without a token to train on are left out.
        kept = self._kept_rows()
        lengths = (self.prompts.lengths + self.responses.lengths)[kept]
        units = None if self.units is None else self.units[kept]
        prompts = self.prompts.take(kept)
        plan = plan_micro_batches(
            lengths, micro_batch_tokens, units, packing=packing, prompts=prompts
        )
        self.plan = [kept[rows] for rows in plan]

        # `agree` replaces `total` by the sum over ranks.
        self.local = self._count(kept)
        self.total = self.local
        self.micros: list[MicroBatch] = []
        """The planned micro-batches, then the dummies; `make_micros` makes them."""

        # `dict.fromkeys` drops repeated names.
        names = (*loss.reads, "loss_mask", *(name for name in (*MISMATCH, LAG) if name in batch))
        self.columns = {name: batch[name] for name in dict.fromkeys(names)}
        # Whether the batch and the loss have the logprobs of both engine and trainer.
        self.compared = "logprobs" in loss.needs and all(name in batch for name in MISMATCH)
        self.lags: list[int] = []
        if self.compared and LAG in batch:
            self.lags = np.unique(torch.as_tensor(batch[LAG].values).numpy()).tolist()
        self.versions = np.zeros(0, np.int32)
        """The versions of the weights that made its tokens, where steps are generated ahead."""
        if self.lags:
            versions = torch.as_tensor(batch["weight_version"].values)
            trained = (torch.as_tensor(self.masks.values) > 0) & (versions >= 0)
            self.versions = np.unique(versions[trained].numpy())
        # Rows whose logprobs, by the loss's own forward pass, are recorded.
        self.recorded: dict[int, np.ndarray] = {}
        self.record_ids: np.ndarray | None = None
        if RECORD_ID in batch and "logprobs" in loss.needs:
            self.record_ids = np.asarray(torch.as_tensor(batch[RECORD_ID].values))
        self.topk = batch["topk_ids"] if "topk_logprobs" in loss.needs else None
        self.extras = {name: batch[name] for name in extras if name in batch}

    def _kept_rows(self) -> np.ndarray:
        """Return the rows with a token to train on, and the other rows of their units."""
        if self.units is None:
            return np.flatnonzero(self.tokens)
        return np.flatnonzero(np.isin(self.units, self.units[self.tokens > 0]))

    def _count(self, rows: np.ndarray) -> Counts:
        """Return this rank's share of the counts that losses divide by."""
        tokens = self.tokens[rows]
        sequences = (tokens > 0).sum()
        units = len(rows) if self.units is None else len(np.unique(self.units[rows]))
        return Counts(float(tokens.sum()), float(sequences), float(units))

    def make_micros(self, count: int) -> None:
        """Make the planned micro-batches, and dummies until there are `count` of them."""
        device = self.context.device
        self.micros = [
            make_micro_batch(
                self.prompts, self.responses, rows, device, self.topk, self.extras, self.packing
            )
            for rows in self.plan
        ]

        # Dummies have as many top-k ids per token as the others, for equal shapes on all ranks.
        topk = 0
        if self.topk is not None:
            topk = int(torch.as_tensor(self.topk.values).shape[-1])
        self.micros += [dummy_micro_batch(device, topk) for _ in range(count - len(self.plan))]

    def _terms(self, columns: Mapping[str, Any], outputs: Mapping[str, torch.Tensor]) -> list[Term]:
        """Return the terms of the loss. Raises HybridFlowError where it returns none."""
        name = type(self.loss).__name__
        terms = self.loss(
            _Declared(columns, self.loss, "reads"), _Declared(outputs, self.loss, "needs")
        )
        listed = [terms] if isinstance(terms, Term) else terms
        if isinstance(listed, Sequence) and all(isinstance(term, Term) for term in listed):
            return list(listed)
        raise HybridFlowError(
            f"the loss {name} returned {type(terms).__name__}; it returns a Term, or several in a "
            "list: Term(name, value [B, T])"
        )

    def _check_zero(self, value: torch.Tensor) -> None:
        """Raise HybridFlowError for a loss that is not 0 and has no gradient."""
        if value.item():
            raise HybridFlowError(
                f"the loss {type(self.loss).__name__} is {value.item():.3g} and has no gradient: "
                "its terms do not depend on `outputs` (a detach or no_grad, say), so nothing would "
                "be learned; give a term that is only reported weight 0"
            )

    def run(self, backend: TrainingBackend, temperature: float, train: bool) -> Tally:
        """Run the forward, and if `train` the backward, of every micro-batch."""
        tally = Tally()

        def share(number: int, outputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
            """Return micro-batch `number`'s share of the loss, and add its terms to the tally."""
            moved()
            if self.micros[number].dummy:
                return _zero_loss(outputs)

            planned = self.plan[number]
            # A loss sees the columns that it declares, and no others.
            rows = padded_rows(self.columns, planned, self.context.device)
            declared = {name: rows[name] for name in (*self.loss.reads, "loss_mask")}
            value, term_tally = reduce_terms(
                self._terms(declared, outputs),
                rows["loss_mask"],
                self.total,
                self._count(planned),
            )
            tally.extend(term_tally)
            if self.compared:
                found = mismatch(rows, outputs["logprobs"], backend.version, self.keeps_cache)
                tally.extend(found)
            if self.lags:
                tally.extend(staleness(rows, outputs["logprobs"], self.lags))
            self._record(planned, outputs)

            # Every term has weight 0, but all ranks must run the same backward passes.
            if train and not value.requires_grad:
                self._check_zero(value)
                return value + _zero_loss(outputs)
            return value

        needs = list(self.loss.needs)
        if train:
            backend.forward_backward(self.micros, needs, share, temperature)
            return tally

        # Only the last pipeline stage has outputs.
        with torch.no_grad():
            for number, outputs in enumerate(backend.forward(self.micros, needs, temperature)):
                if outputs:
                    share(number, outputs)
        return tally

    def _record(self, planned: np.ndarray, outputs: Mapping[str, torch.Tensor]) -> None:
        """Keep the logprobs of the micro-batch's rows that are to be recorded."""
        if self.record_ids is None:
            return
        ids = self.record_ids[planned]
        wanted = np.flatnonzero(ids >= 0)
        if not len(wanted):
            return
        assert self.responses.lengths is not None
        # One copy to the host for all of them.
        values = outputs["logprobs"].detach()[torch.from_numpy(wanted)].float().cpu().numpy()
        for number, row, values_of in zip(ids[wanted], planned[wanted], values, strict=True):
            if self.sequences is not None:
                recorded = self.recorded.get(int(number))
                self.recorded[int(number)] = self.sequences.placed(row, values_of, recorded)
            else:
                self.recorded[int(number)] = values_of[: self.responses.lengths[row]]


class _Declared(dict[str, Any]):
    """What a loss may read by name; another name is an error that says where to declare it."""

    def __init__(self, items: Mapping[str, Any], loss: Loss, declaration: str):
        super().__init__(items)
        self._loss = loss
        self._declaration = declaration

    def __missing__(self, name: str) -> Any:
        raise HybridFlowError(
            f"the loss {type(self._loss).__name__} reads {name!r}, and its "
            f"`{self._declaration}` has {', '.join(self) or 'nothing'}; add it there"
        )


def _zero_loss(outputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return a loss of 0, whose gradients are 0 for every output."""
    return torch.stack([output.sum() * 0.0 for output in outputs.values()]).sum()


def agree(parts: Sequence[LossPart]) -> None:
    """Sum the counts of every part over the data parallel ranks, by one all-reduce.

    Then make equally many micro-batches on each rank, at least one: sharded models wait for one
    another. Per part a rank adds 3 counts and, at its own index, its number of micro-batches.
    """
    context = parts[0].context
    size = 3 + context.layout.dp
    flat: list[float] = []
    for part in parts:
        forwards = [0.0] * context.layout.dp
        forwards[context.coords.dp] = float(len(part.plan))
        flat += [part.local.tokens, part.local.sequences, part.local.units, *forwards]

    summed = context.sum(flat)
    for number, part in enumerate(parts):
        tokens, sequences, units, *forwards = summed[number * size : (number + 1) * size]
        part.total = Counts(tokens, sequences, units)
        part.make_micros(int(max(*forwards, 1)))


def mismatch(
    rows: Mapping[str, torch.Tensor],
    logprobs: torch.Tensor,
    version: int,
    whole_rows: bool = False,
) -> Tally:
    """Return metrics of the difference between the trainer's and the rollout engine's logprobs.

    Over the tokens that the present weights generated, with d = logprobs - rollout_logprobs:
    mismatch_mean is the mean of |d|; mismatch_kl the mean of exp(d) - 1 - d, the k3 estimator of
    KL(rollout || trainer); mismatch_max_ratio the largest exp(|d|). whole_rows: only of rows all of
    whose tokens the present weights generated.
    """
    # Tokens of older weights differ for another reason than the engine.
    d = logprobs.detach() - rows["rollout_logprobs"]
    made = rows["loss_mask"] > 0
    mask = made & (rows["weight_version"] == version)
    if whole_rows:
        mask &= (mask | ~made).all(dim=1, keepdim=True)
    d = torch.where(mask, d, 0.0)
    count = mask.sum()

    tally = Tally()
    tally.add(MISMATCH_MEAN, d.abs().sum(), count)
    tally.add("mismatch_kl", (d.exp() - 1 - d).sum(), count)
    tally.peak("mismatch_max_ratio", d.abs().exp(), mask)
    return tally


def staleness(
    rows: Mapping[str, torch.Tensor], logprobs: torch.Tensor, lags: Sequence[int]
) -> Tally:
    """Return metrics of how far the policy has moved since it generated tokens.

    With d = old - rollout, of the policy before the step's first update and the one that generated:
    lag<j>_kl is the mean of exp(d) - 1 - d over tokens that lag by j steps, the k3 estimator of
    KL(rollout || old); importance_weight the mean of exp(d) over all, and its square's.
    """
    # A loss with one update per step has its old logprobs from its own forward pass.
    old = rows.get("old_logprobs", logprobs.detach())
    mask = rows["loss_mask"] > 0
    d = torch.where(mask, old - rows["rollout_logprobs"], 0.0).clamp(-20, 20)
    weights = d.exp()

    tally = Tally()
    for lag in lags:
        # Of each token, or of all tokens of a row.
        behind = rows[LAG] if rows[LAG].dim() > 1 else rows[LAG][:, None]
        lagging = mask & (behind == lag)
        moved = torch.where(lagging, weights - 1 - d, 0.0)
        tally.add(f"lag{lag}_kl", moved.sum(), lagging.sum())
    count = mask.sum()
    tally.add(WEIGHT, torch.where(mask, weights, 0.0).sum(), count)
    tally.add(f"{WEIGHT}_square", torch.where(mask, weights**2, 0.0).sum(), count)
    return tally


def loss_metrics(tallies: Sequence[Tally], context: RankContext) -> Metrics:
    """Return the metrics of all parts on this rank.

    `loss` is the sum of the shares, and is counted once, by data parallel rank 0: the ranks' shares
    add up to it.
    """
    # One tally, so that all figures reach the host together.
    joined = Tally()
    for tally in tallies:
        joined.extend(tally)

    metrics = joined.metrics()
    total = metrics.means.get("loss", (0.0, 0.0))[0]
    metrics.means["loss"] = (total, 1.0 if context.coords.dp == 0 else 0.0)
    return metrics


def _row_tokens(masks: Column) -> np.ndarray:
    """Return the sum of loss_mask per row, float64 [rows]."""
    assert masks.lengths is not None
    rows = np.repeat(np.arange(masks.rows), masks.lengths)
    weights = torch.as_tensor(masks.values).double().numpy()
    return np.bincount(rows, weights, minlength=masks.rows)


def padded_rows(
    columns: Mapping[str, Column], rows: np.ndarray, device: torch.device, width: int | None = None
) -> dict[str, Any]:
    """Return the columns that a loss is called with, for these rows.

    Floats and masks become float32, integers are unchanged; token columns are padded to
    [rows, width], by default to the longest row. Float columns of response tokens are 0 where
    loss_mask is 0: a nan there (tool output has no logprobs, say) would give nan gradients even
    where it is masked.
    """
    mask = columns["loss_mask"].take(rows)
    hidden = torch.as_tensor(mask.values) == 0
    padded: dict[str, Any] = {}
    for name, column in columns.items():
        taken = column.take(rows)
        if taken.kind == "object":
            padded[name] = taken.values
            continue

        # Only columns of response tokens have the mask's lengths; prompts are left alone.
        tensor = torch.as_tensor(taken.values)
        if taken.kind == "token":
            assert taken.lengths is not None and mask.lengths is not None
            if tensor.is_floating_point() and np.array_equal(taken.lengths, mask.lengths):
                trailing = (1,) * (tensor.dim() - 1)
                tensor = tensor.masked_fill(hidden.view(-1, *trailing), 0)
            tensor = Column(tensor, taken.lengths).padded(width=width)
        # Losses compute in float32, for any dtype of the columns.
        if tensor.is_floating_point() or name == "loss_mask":
            tensor = tensor.float()
        padded[name] = tensor.to(device)
    return padded
