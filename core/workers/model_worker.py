"""The worker behind every model role: a training backend, and for an actor a rollout engine, on each rank."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch

from hybridflow.core.contracts.loss import Loss
from hybridflow.core.contracts.protocol import Protocol
from hybridflow.core.contracts.rollout import RolloutEngine, SamplingParams
from hybridflow.core.contracts.training import TrainingBackend, check_needs
from hybridflow.core.contracts.worker import RankContext, register
from hybridflow.core.errors import HybridFlowError
from hybridflow.core.job.job import ModelRole
from hybridflow.core.plugins import registry
from hybridflow.core.resharding.exchange import Shards
from hybridflow.core.rollouts.checksums import sums_sent
from hybridflow.core.rollouts.same_ranks import HybridEngine
from hybridflow.core.rollouts.weight_sync import SyncCost
from hybridflow.core.serving.build import build_engine, start_engine
from hybridflow.core.values.batch import Batch
from hybridflow.core.values.columns import Column
from hybridflow.core.values.metrics import Metrics
from hybridflow.core.values.weights import WeightLayout
from hybridflow.core.workers.episodes import Episodes
from hybridflow.core.workers.generation import (
    EPISODE_COLUMNS,
    GENERATED,
    generate_episodes,
    generate_rows,
)
from hybridflow.core.workers.gradients import BASE, LossPart, agree, loss_metrics, loss_reads
from hybridflow.core.workers.memory import Peak, measured
from hybridflow.core.workers.micro_batch import (
    dummy_micro_batch,
    make_micro_batch,
    plan_micro_batches,
    unpad,
)
from hybridflow.core.workers.pool_member import PoolMember


@attrs.frozen
class Built:
    """What a rank tells of its model when it is built."""

    parameters: int
    """Of the whole model."""
    sync: SyncCost | None = None
    """What it takes to bring the weights to its engine, where it has one."""


class ModelWorker(PoolMember):
    """Verbs of system.md: generate, logprobs, values, score, loss, update, sync; and save, load, export."""

    def __init__(self, context: RankContext, role: ModelRole, driver: Episodes | None = None):
        """`driver`: what answers its turns, where there is an environment."""
        super().__init__(context)
        self.role, self.driver = role, driver
        backend_class: type[TrainingBackend] = registry().get("training_backend", role.backend)
        self.backend = backend_class(role.model, role.backend_config, role.optimizer, context)
        self.engine: RolloutEngine | None = None
        self.hybrid: HybridEngine | None = None
        self.sync_peak = Peak()
        self._reads = registry().training_capabilities(role.backend).extras
        self._sends = (
            registry().engine_capabilities(role.engine).extras if role.engine else frozenset()
        )

    @register(Protocol.ONE_TO_ALL)
    def build(self) -> Built:
        """Build the model, and the engine's structure; tells parameters, and what a sync of weights will cost."""
        self.backend.build()
        cost: SyncCost | None = None
        if self.role.engine is not None:
            role = self.role
            self.engine = build_engine(
                self.role.engine, role.model, role.engine_config, self.context, role.logs
            )
            start_engine(self.engine)
            resident = self.role.keep_engine and not self.role.offload
            self.hybrid = HybridEngine(
                self.backend, self.engine, self.context, self.role.sync, resident
            )
            cost = self.hybrid.prepare()
        if self.role.offload:
            self.backend.offload()
        return Built(sum(param.numel for param in self.backend.layout().params.values()), cost)

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()

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
        """`columns`: output -> column name, of "logprobs" and "entropy"; `topk` > 0 adds topk_ids and topk_logprobs."""
        outputs = self._forward(batch, [*columns, *([f"topk:{topk}"] if topk else [])])
        named = {columns.get(k, k): v for k, v in outputs.items()}
        return Batch(named)

    @register(Protocol.THREE_D, reads=BASE)
    def values(self, batch: Batch, column: str) -> Batch:
        outputs = self._forward(batch, ["values"])
        return Batch({column: outputs["values"]} if outputs else {})

    @register(Protocol.THREE_D, reads=BASE)
    def score(self, batch: Batch, column: str) -> Batch:
        """`column` [rows], and its mean as a metric, as reward functions report theirs."""
        outputs = self._forward(batch, ["scores"])
        if not outputs:
            return Batch({})
        scores = torch.as_tensor(outputs["scores"].values)
        return Batch(
            {column: scores}, Metrics({column: (float(scores.double().sum()), float(len(scores)))})
        )

    def _forward(self, batch: Batch, needs: list[str]) -> dict[str, Column]:
        """Nothing on a stage that is not the last: its result does not count."""
        check_needs(self.role.model.kind, needs)
        prompts, responses, device = batch["prompt_ids"], batch["response_ids"], self.context.device
        assert prompts.lengths is not None and responses.lengths is not None
        plan = plan_micro_batches(prompts.lengths + responses.lengths, self.role.micro_batch_tokens)
        extras = {name: batch[name] for name in self._reads if name in batch}
        micros = [
            make_micro_batch(prompts, responses, rows, device, extras=extras) for rows in plan
        ]
        most = int(
            max(*self.context.max([len(micros)]), 1)
        )  # forwards: equally many on every dp rank
        micros += [dummy_micro_batch(device) for _ in range(most - len(plan))]
        with self._resident() as backend:
            outputs = backend.forward(micros, needs, self.role.temperature)
        if not outputs[0]:
            return {}
        return {
            name: _column([o[name] for o in outputs], plan, responses.lengths)
            for name in _output_names(needs)
        }

    # Training
    @register(Protocol.THREE_D, reads=loss_reads)
    def update(self, pairs: Sequence[tuple[Batch, Loss]]) -> Metrics:
        """One optimizer step over the sum of the losses of one or more (mini-batch, loss) pairs.

        Raises HybridFlowError when the loss or its gradient is not finite; such a gradient changes no weights.
        """
        started = time.perf_counter()
        with measured(self.context.device) as peak, self._resident() as backend:
            metrics = self._losses(pairs, train=True)
            step = backend.optim_step()
        self._check_finite(metrics.means["loss"][0], step["grad_norm"])
        step.means["update_seconds"] = (time.perf_counter() - started, 1.0)
        step = Metrics() if self.context.coords.dp else step  # equal on all ranks: said once
        return Metrics.merge([metrics, step, _peak_metric("update", peak)])

    @register(Protocol.THREE_D, reads=lambda pair: loss_reads([pair]))
    def loss(self, pair: tuple[Batch, Loss]) -> Metrics:
        """The loss and its terms without an update (validation)."""
        with self._resident():
            return self._losses([pair], train=False)

    def _losses(self, pairs: Sequence[tuple[Batch, Loss]], train: bool) -> Metrics:
        for _, loss in pairs:
            check_needs(self.role.model.kind, loss.needs)
        budget = self.role.micro_batch_tokens
        parts = [LossPart(batch, loss, budget, self.context, self._reads) for batch, loss in pairs]
        agree(parts)
        return loss_metrics(
            [p.run(self.backend, self.role.temperature, train) for p in parts], self.context
        )

    def _check_finite(self, loss: float, grad_norm: float) -> None:
        if np.isfinite(loss) and np.isfinite(grad_norm):
            return
        raise HybridFlowError(
            f"an update of role {self.context.role!r} after {self.backend.version} steps: the gradient norm is "
            f"{grad_norm}, the loss of this rank's rows {loss}; look at the columns that the loss reads, and at lr"
        )

    # Generation
    @register(Protocol.MICRO_DP, reads=("prompt_ids", "sample_id"), writes=GENERATED)
    def generate(
        self,
        batch: Batch,
        sampling: SamplingParams,
        seed: int,
        max_tokens: Sequence[int] | None = None,
    ) -> Batch:
        """Responses for the rows' prompts; with the trained weights of this moment (synced if they are newer).

        max_tokens: a limit per `sample_id` modulo its length (benchmarks, curricula); default sampling.max_tokens.
        """
        return self._generated(generate_rows, batch, sampling, seed, max_tokens)

    @register(Protocol.MICRO_DP, reads=("prompt_ids", "sample_id", "meta"), writes=EPISODE_COLUMNS)
    def episodes(
        self,
        batch: Batch,
        sampling: SamplingParams,
        seed: int,
        max_tokens: Sequence[int] | None = None,
    ) -> Batch:
        """`generate` in turns with the environment's answers between them."""
        assert self.driver is not None, "this role has no environment"
        verb = partial(generate_episodes, episodes=self.driver, context=self.context)
        return self._generated(verb, batch, sampling, seed, max_tokens)

    def _generated(self, verb: Callable[..., Batch], batch: Batch, *how: Any) -> Batch:
        """With the weights of this moment; then the engine's memory is given back. With metrics."""
        assert self.engine is not None, "this role has no rollout engine"
        synced = self._sync()
        with measured(self.context.device) as peak:
            made = verb(self.engine, batch, *how, extras=self._sends)
        if not self.role.keep_engine:
            self.engine.sleep()
        made.metrics.means["sync_seconds"] = (synced, 1.0)
        made.metrics.maxima.update(
            _peak_metric("generate", peak).maxima | self._sync_figures(synced)
        )
        return made

    @register(Protocol.ONE_TO_ALL)
    def sync(self) -> float:
        """Bring the trained weights to the rollout engine; seconds."""
        return self._sync()

    def _sync(self) -> float:
        if self.engine is None or self.hybrid is None:
            return 0.0
        if not self.role.keep_engine:
            self.engine.wake()
        if self.engine.version == self.backend.version and not self.engine.updating:
            return 0.0
        with self._resident(), measured(self.context.device) as self.sync_peak:
            return self.hybrid.sync()

    # To engines in a pool of their own (core/rollouts/separate.py)
    @register(Protocol.RANK_ZERO)
    def weight_layout(self) -> WeightLayout:
        return self.backend.layout()

    @register(Protocol.RANK_ZERO)
    def version(self) -> int:
        return self.backend.version

    @register(Protocol.ONE_TO_ALL)
    def post(self, at: int) -> dict[int, Any]:
        with self._resident() as backend:
            return self.side.post(at, Shards(backend.named_shards()).read)

    @register(Protocol.ONE_TO_ALL)
    def sums_sent(self) -> dict:
        with self._resident() as backend:
            return sums_sent(self.side.plan, self.side.rank, Shards(backend.named_shards()))

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
                digest.update(
                    tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
                )
        return digest.hexdigest()

    def _sync_figures(self, seconds: float) -> dict[str, float]:
        """What the sync before this generation moved: MB (10^6 bytes) received, in buffers, left in place; and what it took
        beyond what was in use, which the plan's buffers should account for."""
        if not seconds or self.hybrid is None:
            return {}
        moved = self.hybrid.last
        return {
            "sync_received_mb": moved.bytes_received / 1e6,
            "sync_buffer_mb": moved.peak_buffer_bytes / 1e6,
            "sync_aliased_mb": self.hybrid.aliased_bytes / 1e6,
            "sync_extra_mb": max(self.sync_peak.most - self.sync_peak.before, 0) / 1e6,
            **_peak_metric("sync", self.sync_peak).maxima,
        }


def _peak_metric(phase: str, peak: Peak) -> Metrics:
    """<phase>_peak_gb: the most memory in use during it (10^9 bytes), the largest over ranks."""
    return Metrics(maxima={f"{phase}_peak_gb": peak.most / 1e9} if peak.most else {})


def _output_names(needs: Sequence[str]) -> list[str]:
    return [
        n
        for need in needs
        for n in (("topk_ids", "topk_logprobs") if need.startswith("topk:") else (need,))
    ]


def _column(outputs: list[torch.Tensor], plan: list[np.ndarray], lengths: np.ndarray) -> Column:
    """[B] or [B, T, ...] per micro-batch -> a column in the rows' own order; outputs of dummies fall away."""
    if not plan:  # this rank has no rows
        empty = outputs[0].new_zeros((0, *outputs[0].shape[2:]), device="cpu")
        return (
            Column(empty) if outputs[0].dim() == 1 else Column(empty, np.zeros(0, dtype=np.int64))
        )
    outputs = outputs[: len(plan)]
    if outputs[0].dim() > 1:
        return unpad(outputs, plan, lengths)
    back = torch.from_numpy(np.argsort(np.concatenate(plan), kind="stable"))
    return Column(torch.cat(outputs).cpu()[back])
