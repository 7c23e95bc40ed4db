"""The worker behind every model role: a training backend, and for an actor a rollout engine.

Every rank of the role has one. Where the actor has an engine of its own, its ranks change between
training and generation:

    update     backend.forward_backward, backend.optim_step     weights of version v + 1
    generate   HybridEngine.sync  ->  engine.generate  ->  engine.sleep (unless generation.keep)
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch

from hybridflow.core.contracts.loss import Loss
from hybridflow.core.contracts.protocol import Protocol
from hybridflow.core.contracts.rollout import RolloutEngine, SamplingParams
from hybridflow.core.contracts.training import PARTS, TrainingBackend, Writing, check_needs
from hybridflow.core.contracts.worker import RankContext, register
from hybridflow.core.errors import HybridFlowError, MismatchError, RewardError
from hybridflow.core.job.job import ModelRole
from hybridflow.core.plugins import registry
from hybridflow.core.resharding.exchange import ShardReader
from hybridflow.core.resharding.plan import plan_reshard
from hybridflow.core.rollouts.build import build_engine, start_engine
from hybridflow.core.rollouts.checksums import sums_sent
from hybridflow.core.rollouts.same_ranks import HybridEngine
from hybridflow.core.rollouts.weight_sync import SyncCost, on_every_rank
from hybridflow.core.values.batch import Batch
from hybridflow.core.values.branches import BRANCHES, sequences
from hybridflow.core.values.columns import Column
from hybridflow.core.values.metrics import Metrics
from hybridflow.core.values.outcomes import failed_rows
from hybridflow.core.values.weights import WeightLayout
from hybridflow.core.workers.agreement import disagreement
from hybridflow.core.workers.episodes import Episodes
from hybridflow.core.workers.generation import (
    COLLECTED,
    EPISODE_COLUMNS,
    EPISODE_READS,
    GENERATE_READS,
    GENERATED,
    collect_rows,
    generate_episodes,
    generate_rows,
)
from hybridflow.core.workers.gradients import (
    BASE,
    OLDEST,
    LossPart,
    agree,
    loss_metrics,
    loss_reads,
)
from hybridflow.core.workers.memory import Peak, measured
from hybridflow.core.workers.micro_batch import (
    dummy_micro_batch,
    make_micro_batch,
    plan_micro_batches,
    unpad,
)
from hybridflow.core.workers.opens_rows import OpensRows
from hybridflow.core.workers.published import Published
from hybridflow.core.workers.residents import Residents

OPTIMIZER_STEPS = "optimizer_steps"
"""The metric of an update that counts the optimizer steps so far, the version of the weights."""


@attrs.frozen
class Built:
    """A rank's report about its model once it is built."""

    parameters: int
    """The number of parameters of the whole model, not of this rank's shards."""
    sync: SyncCost | None = None
    """The cost of a weight sync to the rank's engine; None without an engine."""


def _logprob_columns(batch: Batch, columns: Mapping[str, str], topk: int = 0) -> Sequence[str]:
    """Return the columns that `logprobs` writes."""
    return (*columns.values(), *(("topk_ids", "topk_logprobs") if topk else ()))


def _one_column(batch: Batch, column: str) -> Sequence[str]:
    return (column,)


class ModelWorker(OpensRows):
    """One rank of a model role.

    Its registered methods are the verbs of a role: generate, logprobs, values, score, loss, update
    and sync; and save, load and export.
    """

    def __init__(self, context: RankContext, role: ModelRole, driver: Episodes | None = None):
        """Make the training backend, which `build` builds.

        driver: the environment and its tokenizer; None without an environment.
        """
        super().__init__(context)
        self.role = role
        self.driver = driver
        backend_class: type[TrainingBackend] = registry().get("training_backend", role.backend)
        self.backend = backend_class(role.model, role.backend_config, role.optimizer, context)
        self.engine: RolloutEngine | None = None
        self.hybrid: HybridEngine | None = None
        self._writing: Writing | None = None
        """The last checkpoint's part of this rank."""
        self.published = Published()
        """Of the weights by which open rows were generated."""
        self.sync_peak = Peak()
        self._brought: int | None = None
        """The version of the weights that engines got last."""
        self.residents: Residents = context.shared.setdefault("residents", Residents())

        # Further columns that the backend reads, and that the engine is sent.
        self._reads = registry().training_capabilities(role.backend).extras
        self.sends = (
            registry().engine_capabilities(role.engine).extras if role.engine else frozenset()
        )

    @register(Protocol.ONE_TO_ALL)
    def build(self) -> Built:
        """Build the model, start the engine, and plan the weight sync between them."""
        role = self.role
        self.backend.build()
        cost: SyncCost | None = None
        if role.engine is not None:
            self.engine = build_engine(
                role.engine, role.model, role.engine_config, self.context, role.logs
            )
            start_engine(self.engine)

            # Storage can be shared only while neither side moves its weights.
            target = on_every_rank(self.engine.layout(), self.context)
            self.hybrid = HybridEngine(
                self.backend,
                self.engine,
                self.context,
                plan_reshard(self.backend.layout(), target, role.sync.bucket_bytes),
                role.transport,
                verify=role.sync.verify,
                share=role.sync.alias and role.keep_engine and not role.offload,
            )
            cost = self.hybrid.prepare()

        if role.offload:
            self.residents.join(self.context.role, self.backend)
        # `numel` of the layout is that of the whole parameter.
        params = self.backend.layout().params.values()
        return Built(sum(param.numel for param in params), cost)

    def close(self) -> None:
        """Close the engine, if there is one."""
        self.residents.part(self.context.role)
        if self.engine is not None:
            self.engine.close()

    def _resident(self, *parts: str, alone: bool = False) -> TrainingBackend:
        """Return the backend with these of PARTS on the device; other offloaded roles leave it."""
        self.residents.enter(self.context.role, parts, alone)
        return self.backend

    # --- scoring ---

    @register(Protocol.THREE_D, reads=(*BASE, BRANCHES), writes=_logprob_columns)
    def logprobs(self, batch: Batch, columns: dict[str, str], topk: int = 0) -> Batch:
        """Return the policy's logprobs and entropy at each response token.

        columns: output ("logprobs", "entropy") -> the name of its column. `topk` > 0 adds the
        columns topk_ids and topk_logprobs, [T, topk] per row.
        """
        needs = [*columns]
        if topk:
            needs.append(f"topk:{topk}")
        outputs = self._forward(batch, needs)
        return Batch({columns.get(name, name): column for name, column in outputs.items()})

    @register(Protocol.THREE_D, reads=(*BASE, BRANCHES), writes=_one_column)
    def values(self, batch: Batch, column: str) -> Batch:
        """Return a critic's value at each response token, as `column`."""
        outputs = self._forward(batch, ["values"])
        return Batch({column: outputs["values"]} if outputs else {})

    @register(Protocol.THREE_D, reads=(*BASE, BRANCHES, "outcome"), writes=_one_column)
    def score(self, batch: Batch, column: str) -> Batch:
        """Return a reward model's score of each row, as `column` [rows]; NaN for a failed row.

        Its mean and spread are metrics of the same name, as reward functions report theirs. Raises
        RewardError for a score that is not finite.
        """
        outputs = self._forward(batch, ["scores"])
        if not outputs:
            return Batch({})
        scores = torch.as_tensor(outputs["scores"].values)
        kept = scores
        if "outcome" in batch and any(lost := failed_rows(list(batch["outcome"].values))):
            gone = torch.from_numpy(lost)
            scores = scores.masked_fill(gone, torch.nan)
            kept = scores[~gone]
        if not bool(torch.isfinite(kept).all()):
            raise RewardError(
                "the reward model gave a score that is not a finite number; look at its weights, "
                "and at the precision of its backend"
            )

        # Summed in float64, since a mean over many rows would lose digits in float32.
        mean = (float(kept.double().sum()), float(len(kept)))
        return Batch({column: scores}, Metrics({column: mean}, spreads={column: kept}))

    def _forward(self, batch: Batch, needs: list[str]) -> dict[str, Column]:
        """Return the model's outputs by name.

        Empty on a pipeline stage that is not the last: its result does not count.
        """
        check_needs(self.role.model.kind, needs)
        if (branched := sequences(batch)) is not None:
            of_sequences = self._forward(branched.batch, needs)
            return {name: branched.fold(column) for name, column in of_sequences.items()}
        prompts = batch["prompt_ids"]
        responses = batch["response_ids"]
        device = self.context.device
        assert prompts.lengths is not None and responses.lengths is not None
        packing = self.backend.packing
        lengths = prompts.lengths + responses.lengths
        budget = self.role.micro_batch_tokens
        plan = plan_micro_batches(lengths, budget, packing=packing, prompts=prompts)
        extras = {name: batch[name] for name in self._reads if name in batch}
        micros = [
            make_micro_batch(prompts, responses, rows, device, extras=extras, packing=packing)
            for rows in plan
        ]

        # Every data parallel rank runs equally many forwards, if needed with dummies, since sharded
        # models wait for one another.
        most = int(max(*self.context.max([len(micros)]), 1))
        micros += [dummy_micro_batch(device) for _ in range(most - len(plan))]
        outputs = self._resident("weights").forward(micros, needs, self.role.temperature)
        if not outputs[0]:
            return {}

        columns = {}
        for name in _output_names(needs):
            tensors = [output[name] for output in outputs]
            columns[name] = _column(tensors, plan, responses.lengths)
        return columns

    # --- training ---

    @register(Protocol.THREE_D, reads=loss_reads)
    def update(self, pairs: Sequence[tuple[Batch, Loss]]) -> Metrics:
        """Take one optimizer step over the sum of the losses of one or more (mini-batch, loss)
        pairs.

        Raises MismatchError when the rollout engine's logprobs are not the trainer's, and
        HybridFlowError when the loss or its gradient is not finite; neither changes any weights.
        """
        started = time.perf_counter()
        with measured(self.context.device) as peak:
            backend = self._resident(*PARTS)
            parts = self._parts(pairs)
            with self.context.part("losses"):
                metrics = self._losses(parts, train=True)
            self._check_agreement(parts, metrics)
            with self.context.part("optimizer"):
                step = backend.optim_step()
        # The optimizer has left the weights as they were where the gradient is not finite.
        self._check_finite(metrics.means["loss"][0], step["grad_norm"])

        # Figures of the step are equal on all ranks: data parallel rank 0 reports them.
        step.means["update_seconds"] = (time.perf_counter() - started, 1.0)
        step.maxima[OPTIMIZER_STEPS] = float(backend.version)
        if self.context.coords.dp:
            step = Metrics()
        return Metrics.merge([metrics, step, _peak_metric("update", peak)])

    @register(Protocol.THREE_D, reads=lambda pair: loss_reads([pair]))
    def loss(self, pair: tuple[Batch, Loss]) -> Metrics:
        """Return the loss and its terms without an update (validation)."""
        self._resident("weights")
        return self._losses(self._parts([pair]), train=False)

    def _parts(self, pairs: Sequence[tuple[Batch, Loss]]) -> list[LossPart]:
        # A loss that this model cannot serve raises before any forward.
        for _, loss in pairs:
            check_needs(self.role.model.kind, loss.needs)
        budget = self.role.micro_batch_tokens
        packing = self.backend.packing
        parts = [
            LossPart(batch, loss, budget, self.context, self._reads, packing, self.role.keeps_cache)
            for batch, loss in pairs
        ]
        agree(parts)
        return parts

    def _losses(self, parts: Sequence[LossPart], train: bool) -> Metrics:
        tallies = [part.run(self.backend, self.role.temperature, train) for part in parts]
        metrics = loss_metrics(tallies, self.context)
        if recorded := {key: row for part in parts for key, row in part.recorded.items()}:
            metrics.recorded["logprobs"] = recorded
        if any(len(part.versions) for part in parts):
            metrics.maxima[OLDEST] = -float(np.concatenate([p.versions for p in parts]).min())
        return metrics

    def _check_agreement(self, parts: Sequence[LossPart], metrics: Metrics) -> None:
        """Raise MismatchError on every rank if the engine's logprobs differ; clear gradients."""
        backend = self.backend
        just_synced = self._brought == backend.version and not self.role.ahead
        limit = self.role.mismatch_stop
        problem = disagreement(parts, metrics, self.context, limit, just_synced)
        if problem is None:
            return

        # A step with a gradient that is not finite only clears the gradients.
        def not_finite(_: int, outputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
            return outputs["logprobs"].sum() * torch.nan

        dummies = [dummy_micro_batch(self.context.device)]
        backend.forward_backward(dummies, ["logprobs"], not_finite, self.role.temperature)
        backend.optim_step()
        raise MismatchError(
            f"an update after {backend.version} steps: {problem}; no weights have changed",
            role=self.context.role,
            phase="update",
            rank=self.rank,
        )

    def _check_finite(self, loss: float, grad_norm: float) -> None:
        if np.isfinite(loss) and np.isfinite(grad_norm):
            return
        raise HybridFlowError(
            f"an update of role {self.context.role!r} after {self.backend.version} steps: "
            f"the gradient norm is {grad_norm}, the loss of this rank's rows {loss}; "
            "look at the columns that the loss reads, and at lr"
        )

    # --- generation ---

    @register(Protocol.MICRO_DP, reads=GENERATE_READS, writes=GENERATED)
    def generate(self, batch: Batch, sampling: SamplingParams, seed: int) -> Batch:
        """Generate responses to the rows' prompts, with the present trained weights.

        The weights are synced first if the trainer's are newer. A column max_tokens has each row's
        own limit; without it that is sampling.max_tokens.
        """
        verb = partial(generate_rows, extras=self.sends)
        return self._generated(verb, batch, sampling, seed)

    @register(Protocol.MICRO_DP, reads=EPISODE_READS, writes=EPISODE_COLUMNS)
    def episodes(self, batch: Batch, sampling: SamplingParams, seed: int) -> Batch:
        """Generate responses in turns, with the environment's answers between them."""
        assert self.driver is not None, "this role has no environment"
        verb = partial(
            generate_episodes, episodes=self.driver, context=self.context, extras=self.sends
        )
        return self._generated(verb, batch, sampling, seed)

    # Of responses that outlive a generation phase (carried.py)
    @register(Protocol.MICRO_DP, reads=("sample_id",), writes=COLLECTED)
    def collect(self, batch: Batch, step: int) -> Batch:
        """Generate until the responses of these opened rows are complete, and return them.

        The weights are synced first if the trainer's are newer. step: the one that trains on them.
        """
        self.published.add({step - 1: self.backend.version})

        def verb(engine: RolloutEngine, rows: Batch) -> Batch:
            collected = collect_rows(engine, rows, step, self.carried, self.published)
            self.carried.stop(engine)
            return collected

        return self._generated(verb, batch)

    @register(Protocol.ONE_TO_ALL)
    def publish(self, versions: Mapping[int, int]) -> None:
        """Note step -> the version of the weights after it, as a checkpoint has them."""
        self.published.add(versions)

    def _generated(self, verb: Callable[..., Batch], batch: Batch, *how: Any) -> Batch:
        """Generate with the present weights, then free the engine's memory unless it is kept.

        The result carries the metrics of the sync and of the generation.
        """
        assert self.engine is not None, "this role has no rollout engine"

        # Offloaded roles leave the device to the engine's caches.
        sync_seconds = self._sync()
        self.residents.clear()
        if not self.role.keep_engine:
            self.engine.wake()
        with measured(self.context.device) as peak, self.context.part("tokens"):
            generated = verb(self.engine, batch, *how)
        if not self.role.keep_engine:
            self.engine.sleep()

        metrics = generated.metrics
        metrics.means["sync_seconds"] = (sync_seconds, 1.0)
        metrics.maxima.update(_peak_metric("generate", peak).maxima)
        metrics.maxima.update(self._sync_figures(sync_seconds))
        return generated

    @register(Protocol.ONE_TO_ALL)
    def sync(self) -> float:
        """Send the trained weights to the rollout engine; return the seconds that it took."""
        return self._sync()

    def _sync(self) -> float:
        if self.engine is None or self.hybrid is None:
            return 0.0
        if self.hybrid.version == self.backend.version:
            return 0.0
        # Neither the optimizer nor the engine's caches are needed, and both may not fit.
        self._resident("weights", alone=True)
        if not self.role.keep_engine:
            self.engine.wake(cache=False)
        with measured(self.context.device) as self.sync_peak, self.context.part("sync"):
            seconds = self.hybrid.sync()
        self._brought = self.backend.version
        return seconds

    @register(Protocol.ONE_TO_ALL)
    def compared(self) -> dict[str, str]:
        """Compare all of the engine's weights that can be read back with the trainer's.

        Return the parameters that differ, and how; the trainer's weights must not be newer than the
        last sync.
        """
        if self.engine is None or self.hybrid is None or self.hybrid.version is None:
            return {}
        # An update that failed has left its optimizer on the device.
        backend = self._resident("weights", alone=True)
        self.engine.wake()
        return self.hybrid.compared(backend.version)

    # To engines in a pool of their own (core/rollouts/separate.py)
    @register(Protocol.RANK_ZERO)
    def weight_layout(self) -> WeightLayout:
        """Return which boxes of the parameters each rank of the trainer holds."""
        return self.backend.layout()

    @register(Protocol.RANK_ZERO)
    def version(self) -> int:
        """Return the number of optimizer steps taken, the version of the weights."""
        return self.backend.version

    @register(Protocol.ONE_TO_ALL)
    def post(self, at: int) -> dict[int, Any]:
        """Leave this rank's messages of round `at`: receiver -> ticket."""
        backend = self._resident("weights")
        self._brought = backend.version
        return self.side.post(at, ShardReader(backend.named_shards()).read)

    @register(Protocol.ONE_TO_ALL)
    def sums_sent(self, part: int | None = None) -> dict:
        """Return the checksums of the weights that this rank sends (core/rollouts/checksums.py)."""
        source = ShardReader(self._resident("weights").named_shards())
        return sums_sent(self.side.plan, self.side.rank, source, part)

    # --- files ---

    @register(Protocol.ONE_TO_ALL)
    def save(self, folder: str) -> None:
        """Write this rank's part of a checkpoint: weights and optimizer state.

        The files may be complete later (see `saved`).
        """
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        self._writing = self._resident(*PARTS).save(path)

    @register(Protocol.ONE_TO_ALL)
    def saved(self, wait: bool) -> bool:
        """Return whether this rank's part of the last `save` is on the disk, or wait for that."""
        return self._writing is None or self._writing.done(wait)

    @register(Protocol.ONE_TO_ALL)
    def load(self, folder: str) -> None:
        """Read what `save` wrote."""
        self._resident(*PARTS).load(Path(folder))
        self._brought = None
        # Weights with the same number of steps may differ.
        if self.hybrid is not None:
            self.hybrid.forget()

    @register(Protocol.ONE_TO_ALL)
    def export(self, folder: str, dtype: str = "auto") -> None:
        """Write the model as a Hugging Face folder; dtype: a name of torch's, or "auto"."""
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        backend = self._resident("weights")
        if dtype == "auto":
            backend.export_hf(path)
        else:
            backend.export_hf(path, getattr(torch, dtype))

    @register(Protocol.ONE_TO_ALL)
    def checksum(self) -> str:
        """Return a SHA-256 digest of the whole parameters, for tests and for `resume` checks."""
        digest = hashlib.sha256()
        # As bytes, which numpy has for every dtype.
        for name, tensor in self._resident("weights").full_parameters():
            digest.update(name.encode())
            values = tensor.detach().cpu().contiguous()
            digest.update(values.view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def _sync_figures(self, seconds: float) -> dict[str, float]:
        """Return metrics of the sync before this generation, in MB (10^6 bytes).

        sync_received_mb: received from other ranks. sync_buffer_mb: the plan's buffers.
        sync_aliased_mb: in shared storage, not copied. sync_extra_mb: the increase of memory during
        the sync, which should be about the plan's buffers.
        """
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
    """Return the metric <phase>_peak_gb: the phase's peak memory (10^9 bytes), max over ranks."""
    return Metrics(maxima={f"{phase}_peak_gb": peak.most / 1e9} if peak.most else {})


def _output_names(needs: Sequence[str]) -> list[str]:
    """Return the outputs that a backend returns for these needs: "topk:K" gives two."""
    names = []
    for need in needs:
        names += ["topk_ids", "topk_logprobs"] if need.startswith("topk:") else [need]
    return names


def _column(outputs: list[torch.Tensor], plan: list[np.ndarray], lengths: np.ndarray) -> Column:
    """Return one column in the rows' own order, from outputs [B] or [B, T, ...] per micro-batch.

    Outputs of dummies fall away.
    """
    per_token = outputs[0].dim() > 1
    if not plan:  # this rank has no rows
        shape = (0, *outputs[0].shape[2:])
        empty = outputs[0].new_zeros(shape, device="cpu")
        return Column(empty, np.zeros(0, dtype=np.int64)) if per_token else Column(empty)

    outputs = outputs[: len(plan)]
    if per_token:
        return unpad(outputs, plan, lengths)
    # `plan` has the row of each output; sorting it gives the rows' own order.
    order = torch.from_numpy(np.argsort(np.concatenate(plan), kind="stable"))
    return Column(torch.cat(outputs).cpu()[order])
