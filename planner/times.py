"""Seconds of generation, inference and training of one model in one layout on equal nodes (arXiv:2409.19256, section 6)."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import attrs
import numpy as np

from hybridflow.core.contracts.footprint import Footprint
from hybridflow.core.values.parallel import GenerationLayout, ParallelLayout
from hybridflow.planner.cluster import GB, Nodes
from hybridflow.planner.machine import US, Machine
from hybridflow.planner.workload import PlannedModel, Workload


@attrs.frozen(slots=False)
class Simulator:
    """Of one workload on one kind of nodes."""

    machine: Machine
    workload: Workload

    @classmethod
    def of(cls, nodes: Nodes, workload: Workload) -> Simulator:
        return cls(Machine(nodes), workload)

    @cached_property
    def _footprints(self) -> dict[tuple, Footprint]:
        return {}

    def footprint(
        self, model: PlannedModel, layout: ParallelLayout, micro_batches: int
    ) -> Footprint:
        """What the model's backend says, asked once."""
        key = (model, layout.pp, layout.tp, layout.dp, layout.cp, layout.ep, micro_batches)
        if key not in self._footprints:
            self._footprints[key] = model.settings.footprint(
                model.size, layout, model.trained, micro_batches
            )
        return self._footprints[key]

    def micro_batches(self, model: PlannedModel, sequences: int, dp: int) -> tuple[int, int]:
        """(micro-batches of a dp rank, sequences of one)."""
        mine = -(-sequences // dp)
        most = max(1, model.micro_batch_tokens // self.workload.tokens)
        count = -(-mine // most)
        return count, -(-mine // count)

    def _layer_times(self, model: PlannedModel, tp: int, sequences: int) -> tuple[float, float]:
        """Seconds of the tensor-parallel collectives of one layer's forward, and of the rest that is no matrix product."""
        e = self.machine.nodes.efficiency
        size = sequences * self.workload.tokens * model.shape.hidden * model.execution.compute_bytes
        rest = (
            e.micro_batch_us + e.tp_layer_us * (tp > 1)
        ) * US + e.activation_passes * size / self.machine.memory_peak
        return 2.0 * self.machine.all_reduce(size, tp), rest

    def _logits_time(self, model: PlannedModel, tp: int, tokens: int) -> float:
        """Of one forward pass: softmax and the like."""
        size = tokens * model.logits_of_a_token(tp) * 4.0
        return self.machine.nodes.efficiency.logit_passes * size / self.machine.memory_peak

    def _passes(
        self,
        model: PlannedModel,
        sequences: int,
        layout: ParallelLayout,
        rate: float,
        train: bool = False,
    ) -> float:
        """Seconds of `sequences` through the pipeline: of one forward pass, or of an update's passes. A backward pass takes as
        long as a forward for the gradients of activations, and again for those of the weights that are trained."""
        pp, tp, size, runs = layout.pp, layout.tp, model.size, model.execution
        count, each = self.micro_batches(model, sequences, layout.dp)
        tokens = each * self.workload.tokens
        said = (
            each * self.workload.response_tokens
        )  # the head, which the last stage has, sees no other positions
        again = train and said * model.logits_of_a_token(tp) > runs.logits_at_once
        forwards = 1.0 + (train and runs.recompute)
        passes = forwards + (1.0 + size.trained_share if train else 0.0)
        head_passes = (
            1.0 + again + (1.0 + (not runs.adapter_rank) if train else 0.0)
        )  # `recompute` is of the layers
        flops = passes * tokens * size.trunk_flops(self.workload.tokens) / pp
        flops = (flops + head_passes * said * 2.0 * size.head_params) / tp
        shared, rest = self._layer_times(model, tp, each)
        repeated = forwards + train  # the backward pass has as many collectives as a forward
        layers = model.shape.layers / pp
        stage = flops / rate + layers * (shared * repeated + rest * passes)
        stage += self._logits_time(model, tp, said) * head_passes
        if runs.gathers_logits and tp > 1:
            stage += (1 + again) * self.machine.gather(
                said * model.shape.vocab * runs.compute_bytes, tp
            )
        if pp > 1:
            stage += (1 + train) * self.machine.send(
                tokens * model.shape.hidden * runs.compute_bytes, tp
            )
        moves = self.footprint(model, layout, count)
        gathered = self.machine.collectives(moves.forward)
        if train:
            gathered += self.machine.collectives(moves.backward)
        return (count + pp - 1) * (stage + gathered) + self.machine.collectives(moves.call)

    def inference(self, model: PlannedModel, sequences: int, layout: ParallelLayout) -> float:
        """One forward pass over `sequences`."""
        e = self.machine.nodes.efficiency
        rate = self.machine.flops(model.execution.compute_bytes) * e.inference
        return self._passes(model, sequences, layout, rate) + e.call_ms * 1e-3

    def update(self, model: PlannedModel, sequences: int, layout: ParallelLayout) -> float:
        """One optimizer step on `sequences`."""
        e = self.machine.nodes.efficiency
        rate = self.machine.flops(model.execution.compute_bytes) * e.training
        time = self._passes(model, sequences, layout, rate, train=True)
        count, _ = self.micro_batches(model, sequences, layout.dp)
        moves = self.footprint(model, layout, count)
        time += self.machine.collectives(moves.update) * (1.0 - e.overlap)
        return time + moves.step_traffic / self.machine.optimizer_rate + e.update_ms * 1e-3

    def generation(
        self, model: PlannedModel, sequences: int, engines: GenerationLayout, free: Any
    ) -> Any:
        """On all ranks of `engines`, with `free` bytes of each for the cache (a number, or an array of them); infinite where
        no sequence fits."""
        pp, tp, limits = engines.pp, engines.tp, model.limits
        w, e, machine, size = self.workload, self.machine.nodes.efficiency, self.machine, model.size
        mine = -(-sequences // (engines.train.world // (pp * tp)))
        cut = min(tp, model.shape.kv_heads) * pp
        fit = np.floor_divide(free, model.cache_bytes * w.tokens / cut)
        at_once = np.clip(fit, 1.0, min(mine, limits.max_sequences))
        hidden = model.shape.hidden * limits.weight_bytes
        layers = model.shape.layers
        rate = tp * pp * machine.flops(limits.weight_bytes) * e.inference
        prefill = mine * w.prompt_tokens * size.trunk_flops(w.prompt_tokens) / rate
        prefill += layers * 2.0 * machine.all_reduce(mine * w.prompt_tokens * hidden, tp) / pp
        per_stage = np.maximum(1.0, at_once / pp)
        weights = size.params * limits.weight_bytes * size.read_share(per_stage) / tp
        cached = at_once * (w.prompt_tokens + w.response_tokens / 2) * model.cache_bytes / cut
        step = np.maximum(
            (weights + cached) / machine.memory_rate, at_once * 2.0 * size.active_params / rate
        )
        step = step + layers * 2.0 * machine.all_reduce(per_stage * hidden, tp)
        if pp > 1:
            step = step + pp * machine.send(per_stage * hidden, tp)
        layer = e.decode_layer_us + e.decode_tp_layer_us * (tp > 1)
        step = step + (e.decode_step_us + layer * layers + e.sequence_us * at_once) * US
        seconds = prefill + mine / at_once * w.response_tokens * step + e.call_ms * 1e-3
        return np.where(fit >= 1.0, seconds, np.inf)

    def transition(
        self, model: PlannedModel, layout: ParallelLayout, engines: GenerationLayout
    ) -> float:
        """Seconds of bringing trained weights to the engine."""
        received, fixed = (
            self.received(model, layout, engines),
            self.machine.nodes.efficiency.sync_ms * 1e-3,
        )
        if self.footprint(model, layout, 1).weight_ranks <= self.machine.nodes.per_node:
            return fixed + received / self.machine.link_rate
        return fixed + received * self.machine.nodes.per_node / self.machine.network_rate

    def received(
        self, model: PlannedModel, layout: ParallelLayout, engines: GenerationLayout
    ) -> float:
        """Bytes that a rank lacks of its generation shard: under zero-redundancy grouping (t p - t_g p_g) / (t_g p_g t p) M."""
        size = model.size.params * model.limits.weight_bytes
        return max(0.0, size / (engines.pp * engines.tp) - self.kept(model, layout, engines))

    def kept(self, model: PlannedModel, layout: ParallelLayout, engines: GenerationLayout) -> float:
        """Bytes of a rank's training shard that lie in its generation shard."""
        size = float(model.size.params * model.limits.weight_bytes)
        footprint = self.footprint(model, layout, 1)
        if footprint.spread_over_dp:
            ranks = footprint.weight_ranks
            return size / ranks if engines.pp * engines.tp <= ranks else 0.0
        share = size
        for mine, theirs in ((layout.pp, engines.pp), (layout.tp, engines.tp)):
            if mine % theirs and theirs % mine:
                return 0.0
            share /= max(mine, theirs)
        return share

    def moves(self, model: PlannedModel, layout: ParallelLayout, fetched: float) -> float:
        """Seconds that `fetched` bytes of an offloaded model take from the host and back, in each of its calls."""
        if not model.offload:
            return 0.0
        return 2.0 * fetched / (self.machine.nodes.device.host_gbs * GB)
