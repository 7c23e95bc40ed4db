"""The worker behind every model role: a training backend, and for an actor a rollout engine, on each rank."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch

from hybridflow.core.batch import Batch
from hybridflow.core.columns import Column, tokens
from hybridflow.core.loss import Counts, Loss, reduce_terms
from hybridflow.core.metrics import Metrics
from hybridflow.core.micro_batch import dummy_micro_batch, make_micro_batch, plan_micro_batches, unpad
from hybridflow.core.model import ModelSpec
from hybridflow.core.plugins import registry
from hybridflow.core.protocols import Protocol
from hybridflow.core.rollout import Request, RolloutEngine, SamplingParams
from hybridflow.core.training import MicroBatch, OptimizerConfig, TrainingBackend
from hybridflow.core.transfer import transfer_weights
from hybridflow.core.worker import RankContext, Worker, register

BASE = ("prompt_ids", "response_ids", "loss_mask")


@attrs.frozen
class ModelRole:
    """What a rank must know to build its part of a role."""

    model: ModelSpec
    backend: str
    backend_config: Any
    micro_batch_tokens: int
    optimizer: OptimizerConfig | None = None
    """None: frozen."""
    engine: str | None = None
    engine_config: Any = None
    temperature: float = 1.0
    """Of the policy whose logprobs are meant, in training as in sampling."""
    offload: bool = False
    """Weights and optimizer leave the device while other roles of the pool work."""
    check_finite: bool = attrs.field(default=True)
    """Stop with an error when a loss or the gradient norm is not finite."""


def _update_reads(pairs: Sequence[tuple[Batch, Loss]], **_: Any) -> Sequence[str]:
    extra = {"topk_ids"} if any("topk_logprobs" in loss.needs for _, loss in pairs) else set()
    units = {loss.unit for _, loss in pairs} - {"row"}
    return [*BASE, *sorted({name for _, loss in pairs for name in loss.reads} | extra | units)]


class ModelWorker(Worker):
    """Verbs of system.md: generate, logprobs, values, score, loss, update, sync; and save, load, export."""

    def __init__(self, context: RankContext, role: ModelRole):
        super().__init__(context)
        self.role = role
        backend_class: type[TrainingBackend] = registry().get("training_backend", role.backend)
        self.backend = backend_class(role.model, role.backend_config, role.optimizer, context)
        self.engine: RolloutEngine | None = None

    @register(Protocol.ONE_TO_ALL)
    def build(self) -> dict[str, Any]:
        """Build the model, and the engine's structure; tells parameters and memory."""
        self.backend.build()
        if self.role.engine is not None:
            engine_class = registry().get("rollout_engine", self.role.engine)
            self.engine = engine_class(self.role.model, self.role.engine_config, self.context)
            self.engine.start()
        if self.role.offload:
            self.backend.offload()
        params = self.backend.layout().params.values()
        return {"parameters": sum(int(np.prod(p.shape)) for p in params)}

    @contextmanager
    def _resident(self) -> Iterator[TrainingBackend]:
        if self.role.offload:
            self.backend.onload()
        try:
            yield self.backend
        finally:
            if self.role.offload:
                self.backend.offload()

    # Scoring
    @register(Protocol.THREE_D, reads=BASE)
    def logprobs(self, batch: Batch, columns: dict[str, str], topk: int = 0) -> Batch:
        """`columns`: output -> column name, of "logprobs" and "entropy"; with `topk`, topk_ids and topk_logprobs too."""
        outputs = self._forward(batch, [*columns, *([f"topk:{topk}"] if topk else [])])
        named = {columns.get(k, k): v for k, v in outputs.items()}
        return Batch(named)

    @register(Protocol.THREE_D, reads=BASE)
    def values(self, batch: Batch, column: str) -> Batch:
        return Batch({column: self._forward(batch, ["values"])["values"]})

    @register(Protocol.THREE_D, reads=BASE)
    def score(self, batch: Batch, column: str) -> Batch:
        return Batch({column: self._forward(batch, ["scores"])["scores"]})

    def _forward(self, batch: Batch, needs: list[str]) -> dict[str, Column]:
        prompts, responses = batch["prompt_ids"], batch["response_ids"]
        assert prompts.lengths is not None and responses.lengths is not None
        plan = plan_micro_batches(prompts.lengths + responses.lengths, self.role.micro_batch_tokens)
        with self._resident() as backend:
            micros = self._with_dummies([make_micro_batch(prompts, responses, r, self.context.device) for r in plan])
            outputs = backend.forward(micros, needs, self.role.temperature)[: len(plan)]
        return {name: self._rows_of(name, outputs, plan, responses.lengths) for name in _output_names(needs)}

    def _rows_of(self, name: str, outputs: list[dict], plan: list[np.ndarray], lengths: np.ndarray) -> Column:
        if not plan:  # this rank has no rows
            empty = torch.zeros(0, dtype=torch.int64 if name == "topk_ids" else torch.float32)
            return Column(empty) if name == "scores" else Column(empty, np.zeros(0, dtype=np.int64))
        if name == "scores":
            back = torch.from_numpy(np.argsort(np.concatenate(plan), kind="stable"))
            return Column(torch.cat([o[name].cpu() for o in outputs])[back])
        return unpad([o[name] for o in outputs], plan, lengths)

    def _with_dummies(self, micros: list[MicroBatch], topk: int = 0) -> list[MicroBatch]:
        """The same number of forwards on every dp rank, at least one: sharded models wait for one another."""
        most = int(max(*self.context.max([len(micros)]), 1))
        return micros + [dummy_micro_batch(self.context.device, topk) for _ in range(most - len(micros))]

    # Training
    @register(Protocol.THREE_D, reads=_update_reads)
    def update(self, pairs: Sequence[tuple[Batch, Loss]]) -> Metrics:
        """One optimizer step over the sum of the losses of one or more (mini-batch, loss) pairs."""
        started = time.perf_counter()
        with self._resident() as backend:
            metrics = [self._gradients(batch, loss, train=True) for batch, loss in pairs]
            step = backend.optim_step()
        if self.role.check_finite and not np.isfinite(step["grad_norm"]):
            raise FloatingPointError(f"the gradient norm of update {backend.version} is {step['grad_norm']}")
        if not self._speaks():
            return Metrics()
        step.means["update_seconds"] = (time.perf_counter() - started, 1.0)
        if self.context.coords.dp:  # the same on every rank: said once
            step = Metrics()
        return Metrics.merge([*metrics, step])

    @register(Protocol.THREE_D, reads=lambda pair: _update_reads([pair]))
    def loss(self, pair: tuple[Batch, Loss]) -> Metrics:
        """The loss and its terms without an update (validation)."""
        with self._resident():
            return self._gradients(*pair, train=False)

    def _speaks(self) -> bool:
        at = self.context.coords
        return at.tp == 0 and at.cp == 0

    def _gradients(self, batch: Batch, loss: Loss, train: bool) -> Metrics:
        prompts, responses, masks = batch["prompt_ids"], batch["response_ids"], batch["loss_mask"]
        assert prompts.lengths is not None and responses.lengths is not None
        units = None if loss.unit == "row" else np.asarray(torch.as_tensor(batch[loss.unit].values))
        local = _count(masks, units)
        totals = self.context.sum([local.tokens, local.sequences, local.units])
        counts = Counts(*totals)
        plan = plan_micro_batches(prompts.lengths + responses.lengths, self.role.micro_batch_tokens, units)
        topk = batch["topk_ids"] if "topk_logprobs" in loss.needs else None
        micros = [make_micro_batch(prompts, responses, rows, self.context.device, topk) for rows in plan]
        micros = self._with_dummies(micros, 0 if topk is None else int(torch.as_tensor(topk.values).shape[-1]))
        columns = {name: batch[name] for name in dict.fromkeys((*loss.reads, "loss_mask"))}
        found: list[Metrics] = []

        def share(at: int, outputs: Any) -> torch.Tensor:
            if micros[at].dummy:
                return sum((o.sum() * 0.0 for o in outputs.values()), torch.zeros((), device=self.context.device))
            rows = _padded_rows(columns, plan[at], self.context.device)
            mine = None if units is None else units[plan[at]]
            total, metrics = reduce_terms(
                loss(rows, outputs), rows["loss_mask"], counts, _count(masks.take(plan[at]), mine)
            )
            found.append(metrics)
            return total

        if train:
            self.backend.forward_backward(micros, list(loss.needs), share, self.role.temperature)
        else:
            with torch.no_grad():
                for at, outputs in enumerate(self.backend.forward(micros, list(loss.needs), self.role.temperature)):
                    share(at, outputs)
        metrics = Metrics.merge(found)
        total = sum(m.means["loss"][0] for m in found)
        metrics.means["loss"] = (total, 1.0 if self.context.coords.dp == 0 else 0.0)  # shares add up over ranks
        if self.role.check_finite and not np.isfinite(total):
            raise FloatingPointError(
                f"the loss is {total}; look at the columns {', '.join(columns)} of this mini-batch"
            )
        return metrics

    # Generation
    @register(
        Protocol.MICRO_DP, reads=("prompt_ids", "sample_id"),
        writes=("response_ids", "rollout_logprobs", "loss_mask", "weight_version", "finish_reason"),
    )  # fmt: skip
    def generate(
        self, batch: Batch, sampling: SamplingParams, seed: int, max_tokens: Sequence[int] | None = None
    ) -> Batch:
        """Responses for the rows' prompts; with the trained weights of this moment (synced if they are newer).

        max_tokens: a limit per `sample_id` modulo its length, for benchmarks and curricula; default sampling.max_tokens.
        """
        assert self.engine is not None, "this role has no rollout engine"
        started = time.perf_counter()
        synced = self._sync()
        prompts, samples = batch["prompt_ids"], torch.as_tensor(batch["sample_id"].values).tolist()
        requests = []
        for row, (prompt, sample) in enumerate(zip(prompts, samples, strict=True)):
            limit = (
                sampling
                if max_tokens is None
                else attrs.evolve(sampling, max_tokens=max_tokens[sample % len(max_tokens)])
            )
            requests.append(Request(row, prompt.numpy(), limit, seed=row_seed(seed, sample)))
        done = self.engine.generate(requests) if requests else []
        ids = tokens([c.response_ids for c in done], torch.int64)
        seconds = time.perf_counter() - started
        reasons = [c.finish_reason for c in done]
        metrics = Metrics(
            {
                "response_length": (len(ids.values), len(done)),
                "clipped": (reasons.count("length"), len(done)),
                "generate_seconds": (seconds - synced, 1.0),
                "sync_seconds": (synced, 1.0),
            }
        )
        return Batch(
            {
                "response_ids": ids,
                "rollout_logprobs": tokens([c.logprobs for c in done], torch.float32),
                "loss_mask": Column(torch.ones(len(ids.values), dtype=torch.uint8), ids.lengths),
                "weight_version": tokens([c.weight_version for c in done], torch.int32),
                "finish_reason": reasons,
            },
            metrics,
        )

    @register(Protocol.ONE_TO_ALL)
    def sync(self) -> float:
        """Bring the trained weights to the rollout engine; seconds."""
        return self._sync()

    def _sync(self) -> float:
        if self.engine is None or (self.engine.version == self.backend.version and not self.engine.updating):
            return 0.0
        started = time.perf_counter()
        with self._resident() as backend:
            transfer_weights(backend, self.engine, backend.version)
        return time.perf_counter() - started

    # Files
    @register(Protocol.ONE_TO_ALL)
    def save(self, folder: str) -> None:
        with self._resident() as backend:
            backend.save(Path(folder))

    @register(Protocol.ONE_TO_ALL)
    def load(self, folder: str) -> None:
        with self._resident() as backend:
            backend.load(Path(folder))

    @register(Protocol.ONE_TO_ALL)
    def export(self, folder: str) -> None:
        with self._resident() as backend:
            backend.export_hf(Path(folder))

    @register(Protocol.ONE_TO_ALL)
    def checksum(self) -> str:
        """A digest of the whole parameters, for tests and for `resume` checks."""
        digest = hashlib.sha256()
        with self._resident() as backend:
            for name, tensor in backend.full_parameters():
                digest.update(name.encode())
                digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    @register(Protocol.ONE_TO_ALL)
    def memory(self) -> dict[str, int]:
        """Bytes on the device: now, and the peak since the last call (0 on a CPU)."""
        if self.context.device.type != "cuda":
            return {"allocated": 0, "peak": 0}
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return {"allocated": torch.cuda.memory_allocated(), "peak": peak}


def row_seed(seed: int, sample: int) -> int:
    """The seed of one sequence: from the run's seed and the sample's number, so not from ranks or batches."""
    digest = hashlib.blake2b(f"{seed}:{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _output_names(needs: Sequence[str]) -> list[str]:
    return [n for need in needs for n in (("topk_ids", "topk_logprobs") if need.startswith("topk:") else (need,))]


def _count(masks: Column, units: np.ndarray | None) -> Counts:
    assert masks.lengths is not None
    values = torch.as_tensor(masks.values).double()
    rows = torch.from_numpy(np.repeat(np.arange(masks.rows), masks.lengths))
    per_row = torch.zeros(masks.rows, dtype=torch.float64).index_add_(0, rows, values)
    present = (per_row > 0).numpy()
    in_units = int(present.sum()) if units is None else len(np.unique(units[present]))
    return Counts(float(values.sum()), float(present.sum()), float(in_units))


def _padded_rows(columns: dict[str, Column], rows: np.ndarray, device: torch.device) -> dict[str, Any]:
    """What a loss is called with: float columns in float32, masks as float32, integers as they are."""
    out: dict[str, Any] = {}
    for name, column in columns.items():
        taken = column.take(rows)
        if taken.kind == "object":
            out[name] = taken.values
            continue
        tensor = taken.padded() if taken.kind == "token" else torch.as_tensor(taken.values)
        out[name] = (tensor.float() if tensor.is_floating_point() or name == "loss_mask" else tensor).to(device)
    return out
