"""The three simulators (arXiv:2409.19256, section 6): seconds of generation, inference and training of one model in one layout
on equal nodes, and the bytes it takes there. Analytical: peak figures of the data sheet times efficiencies.

All functions take the layout as (pp, tp, dp): ranks run tp first, then pp, then dp.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import attrs
import numpy as np

from hybridflow.core.mapping.cluster import GB, Nodes
from hybridflow.core.mapping.workload import PlannedModel, Workload

US = 1e-6
_OVER_DP = {
    "3d": (0, 0, 0), "3d-zero1": (0, 0, 1), "zero1": (0, 0, 1), "zero2": (0, 1, 1), "zero3": (1, 1, 1), "fsdp": (1, 1, 1),
}  # fmt: skip
"""Whether weights, gradients and the optimizer are spread over dp."""


@attrs.frozen(slots=False)
class Machine:
    """Times of the elementary operations on equal nodes."""

    nodes: Nodes

    def flops(self, width: int) -> float:
        """Peak of matrix products of numbers of `width` bytes."""
        device = self.nodes.device
        return (device.fp32_tflops if width == 4 and device.fp32_tflops else device.tflops) * 1e12

    @cached_property
    def memory_peak(self) -> float:
        return self.nodes.device.bandwidth_gbs * GB

    @cached_property
    def memory_rate(self) -> float:
        return self.memory_peak * self.nodes.efficiency.memory

    @cached_property
    def optimizer_rate(self) -> float:
        return self.memory_peak * self.nodes.efficiency.optimizer

    @cached_property
    def link_rate(self) -> float:
        return self.nodes.device.link_gbs * GB * self.nodes.efficiency.link

    @cached_property
    def network_rate(self) -> float:
        """Of a whole node."""
        return self.nodes.between_gbs * GB * self.nodes.efficiency.network

    def ring(self, sent: Any, ranks: int, step: int, times: float) -> Any:
        """Seconds of a ring collective over `ranks` ranks that are `step` apart, in which each sends `sent` bytes in all, in
        `times` (ranks - 1) messages. Groups of one node work at the same time and share its way out."""
        if ranks == 1:
            return 0.0
        e = self.nodes.efficiency
        if ranks * step <= self.nodes.per_node:
            return sent / self.link_rate + times * (ranks - 1) * e.link_latency_us * US
        together = min(step, self.nodes.per_node)
        slowest = min(self.link_rate, self.network_rate / together)
        return sent / slowest + times * (ranks - 1) * e.network_latency_us * US

    def all_reduce(self, size: Any, ranks: int, step: int = 1) -> Any:
        return self.ring(2.0 * (ranks - 1) / ranks * size, ranks, step, 2.0)

    def gather(self, size: float, ranks: int, step: int = 1) -> float:
        """All-gather or reduce-scatter of `size` bytes in all."""
        return self.ring((ranks - 1) / ranks * size, ranks, step, 1.0)

    def send(self, size: Any, step: int) -> Any:
        """Of each rank to one that is `step` further."""
        e = self.nodes.efficiency
        if step < self.nodes.per_node:
            return size / self.link_rate + e.link_latency_us * US
        return size * self.nodes.per_node / self.network_rate + e.network_latency_us * US


@attrs.frozen
class Bytes:
    """Memory of one device for one model."""

    resident: float
    """Between its phases."""
    training: float = 0.0
    """More while it trains."""
    inference: float = 0.0
    """More while it reads."""
    fetched: float = 0.0
    """Of both, what an offloaded model brings from the host and back."""


@attrs.frozen(slots=False)
class Simulator:
    """Of one workload on one kind of nodes."""

    machine: Machine
    workload: Workload

    @classmethod
    def of(cls, nodes: Nodes, workload: Workload) -> Simulator:
        return cls(Machine(nodes), workload)

    # Splits
    def micro_batches(self, model: PlannedModel, sequences: int, dp: int) -> tuple[int, int]:
        """(micro-batches of a dp rank, sequences of one)."""
        mine = -(-sequences // dp)
        most = max(1, model.micro_batch_tokens // self.workload.tokens)
        count = -(-mine // most)
        return count, -(-mine // count)

    def _layer_times(self, model: PlannedModel, tp: int, sequences: int) -> tuple[float, float]:
        """Seconds of the tensor-parallel collectives of one layer's forward, and of the rest that is no matrix product."""
        e = self.machine.nodes.efficiency
        size = sequences * self.workload.tokens * model.shape.hidden * model.compute_bytes
        rest = (
            e.micro_batch_us + e.tp_layer_us * (tp > 1)
        ) * US + e.activation_passes * size / self.machine.memory_peak
        return 2.0 * self.machine.all_reduce(size, tp), rest

    def _logits_time(self, model: PlannedModel, tp: int, tokens: int) -> float:
        """Of one forward pass: softmax and the like."""
        size = tokens * model.logits_of_a_token(tp) * 4.0
        return self.machine.nodes.efficiency.logit_passes * size / self.machine.memory_peak

    def _passes(
        self, model: PlannedModel, sequences: int, layout: tuple[int, int, int], rate: float, train: bool = False
    ) -> float:
        """Seconds of `sequences` through the pipeline: of one forward pass, or of an update's passes. A backward pass takes as
        long as a forward for the gradients of activations, and again for those of the weights that are trained."""
        pp, tp, dp = layout
        count, each = self.micro_batches(model, sequences, dp)
        tokens = each * self.workload.tokens
        said = each * self.workload.response_tokens  # the head, which the last stage has, sees no other positions
        again = train and said * model.logits_of_a_token(tp) > model.logits_at_once
        forwards = 1.0 + (train and model.recompute)
        passes = forwards + (1.0 + model.trained_share if train else 0.0)
        head_passes = 1.0 + again + (1.0 + (not model.adapter_rank) if train else 0.0)  # `recompute` is of the layers
        flops = passes * tokens * model.trunk_flops(self.workload.tokens) / pp
        flops = (flops + head_passes * said * 2.0 * model.head_params) / tp
        shared, rest = self._layer_times(model, tp, each)
        repeated = forwards + train  # the backward pass has as many collectives as a forward
        layers = model.shape.layers / pp
        stage = flops / rate + layers * (shared * repeated + rest * passes)
        stage += self._logits_time(model, tp, said) * head_passes
        if model.gathers_logits and tp > 1:
            stage += (1 + again) * self.machine.gather(said * model.shape.vocab * model.compute_bytes, tp)
        if pp > 1:
            stage += (1 + train) * self.machine.send(tokens * model.shape.hidden * model.compute_bytes, tp)
        whole = model.params / tp * model.compute_bytes
        gather = self.machine.gather(whole, model.shards(dp), tp) if model.gathers else 0.0
        if model.gathers_at_once or model.keeps_gathered:
            return (count + pp - 1) * stage + gather
        return (count + pp - 1) * (stage + (1 + train) * gather)

    # Times
    def inference(self, model: PlannedModel, sequences: int, layout: tuple[int, int, int]) -> float:
        e = self.machine.nodes.efficiency
        return (
            self._passes(model, sequences, layout, self.machine.flops(model.compute_bytes) * e.inference)
            + e.call_ms * 1e-3
        )

    def update(self, model: PlannedModel, sequences: int, layout: tuple[int, int, int]) -> float:
        """One optimizer step on `sequences`."""
        pp, tp, dp = layout
        e = self.machine.nodes.efficiency
        time = self._passes(model, sequences, layout, self.machine.flops(model.compute_bytes) * e.training, train=True)
        mine = model.stage_params(pp) / tp * model.trained_share
        step, shards = tp * pp, model.shards(dp)
        if model.sharding == "3d":
            reduction = self.machine.all_reduce(mine * model.gradient_bytes, dp, step)
        else:
            reduction = self.machine.gather(mine * model.gradient_bytes, shards, step)
            if model.sharding in ("zero2", "zero3"):  # of each micro-batch
                reduction *= self.micro_batches(model, sequences, dp)[0]
            if not model.gathers:
                reduction += self.machine.gather(mine * model.compute_bytes, shards, step)
            reduction += self.machine.all_reduce(mine / shards * model.gradient_bytes, dp // shards, step * shards)
        time += reduction * (1.0 - e.overlap)
        owned = mine if model.sharding == "3d" else mine / shards
        touched = owned * (2 * model.optimizer_bytes + model.gradient_bytes + 2 * model.weight_bytes)
        return time + touched / self.machine.optimizer_rate + e.update_ms * 1e-3

    def generation(self, model: PlannedModel, sequences: int, devices: int, layout: tuple[int, int], free: Any) -> Any:
        """On `devices` in replicas of (pp, tp), with `free` bytes of each for the cache (a number, or an array of them);
        infinite where no sequence fits."""
        pp, tp = layout
        w, e, machine = self.workload, self.machine.nodes.efficiency, self.machine
        mine = -(-sequences // (devices // (pp * tp)))
        cut = min(tp, model.shape.kv_heads) * pp
        fit = np.floor_divide(free, model.cache_bytes * w.tokens / cut)
        at_once = np.clip(fit, 1.0, min(mine, model.max_sequences))
        hidden = model.shape.hidden * model.rollout_bytes
        layers = model.shape.layers
        rate = tp * pp * machine.flops(model.rollout_bytes) * e.inference
        prefill = mine * w.prompt_tokens * model.trunk_flops(w.prompt_tokens) / rate
        prefill += layers * 2.0 * machine.all_reduce(mine * w.prompt_tokens * hidden, tp) / pp
        per_stage = np.maximum(1.0, at_once / pp)
        weights = model.params * model.rollout_bytes * model.read_share(per_stage) / tp
        cached = at_once * (w.prompt_tokens + w.response_tokens / 2) * model.cache_bytes / cut
        step = np.maximum((weights + cached) / machine.memory_rate, at_once * 2.0 * model.active_params / rate)
        step = step + layers * 2.0 * machine.all_reduce(per_stage * hidden, tp)
        if pp > 1:
            step = step + pp * machine.send(per_stage * hidden, tp)
        layer = e.decode_layer_us + e.decode_tp_layer_us * (tp > 1)
        step = step + (e.decode_step_us + layer * layers + e.sequence_us * at_once) * US
        seconds = prefill + mine / at_once * w.response_tokens * step + e.call_ms * 1e-3
        return np.where(fit >= 1.0, seconds, np.inf)

    def transition(self, model: PlannedModel, layout: tuple[int, int, int], rollout: tuple[int, int]) -> float:
        """Seconds of bringing trained weights to the engine."""
        received, fixed = self.received(model, layout, rollout), self.machine.nodes.efficiency.sync_ms * 1e-3
        pp, tp, dp = layout
        spans = model.shards(dp) if model.gathers else 1
        if pp * tp * spans <= self.machine.nodes.per_node:
            return fixed + received / self.machine.link_rate
        return fixed + received * self.machine.nodes.per_node / self.machine.network_rate

    def received(self, model: PlannedModel, layout: tuple[int, int, int], rollout: tuple[int, int]) -> float:
        """Bytes that a rank lacks of its generation shard: under zero-redundancy grouping (t p - t_g p_g) / (t_g p_g t p) M."""
        size = model.params * model.rollout_bytes
        return max(0.0, size / (rollout[0] * rollout[1]) - self._kept(model, layout, rollout))

    def _kept(self, model: PlannedModel, layout: tuple[int, int, int], rollout: tuple[int, int]) -> float:
        """Bytes of a rank's training shard that lie in its generation shard."""
        pp, tp, dp = layout
        size = float(model.params * model.rollout_bytes)
        if model.gathers:
            ranks = pp * tp * model.shards(dp)
            return size / ranks if rollout[0] * rollout[1] <= ranks else 0.0
        share = size
        for mine, theirs in zip((pp, tp), rollout, strict=True):
            if mine % theirs and theirs % mine:
                return 0.0
            share /= max(mine, theirs)
        return share

    # Memory
    def _held(self, model: PlannedModel, layout: tuple[int, int, int]) -> tuple[float, ...]:
        """Bytes of a rank's weights, gradients and optimizer."""
        pp, tp, dp = layout
        mine, shards = model.stage_params(pp) / tp, model.shards(dp)
        learnt = mine * model.trained_share * model.trained
        every = zip((mine, learnt, learnt), (model.weight_bytes, model.gradient_bytes, model.optimizer_bytes),
                    _OVER_DP[model.sharding], strict=True)  # fmt: skip
        return tuple(parameters * size / shards**spread for parameters, size, spread in every)

    def bytes(self, model: PlannedModel, layout: tuple[int, int, int]) -> Bytes:
        weights, gradients, optimizer = (0.0, 0.0, 0.0) if model.on_host else self._held(model, layout)
        resident = weights + optimizer
        if model.gradients_stay:
            resident += gradients + self._bucket(model) * model.trained
        updates, reads = self.workload.of(model.name, "train"), self.workload.of(model.name, "infer")
        training = max((self._update_bytes(model, t.sequences, layout, gradients) for t in updates), default=0.0)
        inference = max((self._read_bytes(model, t.sequences, layout) for t in reads), default=0.0)
        fetched = resident if model.offload else 0.0
        resident, training, inference = resident - fetched, training + fetched, inference + fetched
        return Bytes(resident, training if updates else 0.0, inference if reads else 0.0, fetched)

    def _gathered(self, model: PlannedModel, layout: tuple[int, int, int]) -> tuple[float, float]:
        """Bytes of whole weights in a forward pass, and in a backward pass."""
        if not model.gathers:
            return 0.0, 0.0
        _, tp, dp = layout
        whole = model.params / tp * model.compute_bytes
        ranks = model.shards(dp) > 1  # one alone copies its weights, and fetches nothing
        if model.sharding == "zero3":
            ahead = max(self._bucket(model), model.layer_params * model.compute_bytes)
            return 2.0 * ahead, ahead  # in a forward pass what they were fetched in is there too
        if model.gathers_at_once:
            return (1.0 + ranks) * whole, whole  # in a forward pass what they were gathered in is there too
        layer = model.layer_params / tp * model.compute_bytes
        others = whole - model.shape.layers * layer
        if model.keeps_gathered:
            return whole + ranks * layer, whole + ranks * layer
        return others + (1.0 + ranks) * layer, others + (1.0 + ranks) * layer  # one at work and the next

    def _read_bytes(self, model: PlannedModel, sequences: int, layout: tuple[int, int, int]) -> float:
        """More while it reads."""
        _, working, logits = self.activations(model, sequences, layout)
        return self._gathered(model, layout)[0] + max(working, self._forward_logits(model, layout[1], logits))

    def _forward_logits(self, model: PlannedModel, tp: int, logits: float) -> float:
        """With their softmax, and under tp what they are gathered from."""
        return logits * (2.0 + (model.gathers_logits and tp > 1) / tp)

    def _bucket(self, model: PlannedModel) -> float:
        """Bytes of the buffer in which gradients are reduced, and weights fetched ahead."""
        return min(model.bucket_elements, model.params) * model.compute_bytes

    def _update_bytes(
        self, model: PlannedModel, sequences: int, layout: tuple[int, int, int], gradients: float
    ) -> float:
        """More while it trains: the most of the forward pass, the beginning and the end of the backward pass, and the reduction
        of gradients. `gradients`: of this rank's share."""
        _, tp, dp = layout
        count, _ = self.micro_batches(model, sequences, dp)
        kept, working, logits = self.activations(model, sequences, layout)
        ended = kept + self._forward_logits(model, tp, logits)
        forward, backward = self._gathered(model, layout)
        embedding = model.shape.vocab * model.shape.hidden / tp * model.compute_bytes * model.trained_share
        begun = kept + (working if model.recompute else 0.0) + 3.0 * logits + (embedding if logits else 0.0)
        if model.sharding == "zero3":
            return max(forward + ended, backward + begun)
        if not model.gathers:
            unreduced = 0.0 if model.gradients_stay else gradients
            reduced = 2.0 * self._bucket(model) + unreduced / (dp if model.sharding == "zero1" else 1)
            return max(max(ended, begun) + unreduced * (count > 1), reduced)
        whole = model.params / tp * model.trained_share
        unreduced = whole * model.compute_bytes if count > 1 or model.gathers_at_once else gradients
        phases = [
            forward + ended,
            backward + begun,
            backward + unreduced + 2.0 * embedding,
        ]
        if count > 1:
            phases.append(backward + unreduced + begun)
        if count > 1 or model.gathers_at_once:
            group = 1.0 if model.gathers_at_once else max(model.layer_params, model.head_params) / model.params
            sent = group * whole * model.gradient_bytes
            kept_back = unreduced if group < 1.0 else 0.0
            if dp > 1:  # gloo reduces in a copy
                phases += [unreduced + sent, kept_back + sent * (2.0 + 1.0 / dp)]
        return max(phases)

    def moves(self, model: PlannedModel, layout: tuple[int, int, int]) -> float:
        """Seconds that an offloaded model takes from the host and back, in each of its calls."""
        if not model.offload:
            return 0.0
        return 2.0 * self.bytes(model, layout).fetched / (self.machine.nodes.device.host_gbs * GB)

    def activations(
        self, model: PlannedModel, sequences: int, layout: tuple[int, int, int]
    ) -> tuple[float, float, float]:
        """Bytes of one rank's: what the micro-batches in flight keep for the backward pass, what one layer works with, and the
        float32 logits of a micro-batch that are there at once.

        A layer of a Llama-like model keeps, per token, 10 numbers for each hidden unit (two residuals, two norms before and
        after their weights; queries, keys, values and what attention gives, fewer under GQA) and 4 for each
        intermediate one (gate, its activation, up, their product); attention keeps no scores. tp cuts all but the residuals and
        norms.
        """
        pp, tp, dp = layout
        count, each = self.micro_batches(model, sequences, dp)
        tokens, shape = each * self.workload.tokens, model.shape
        attention = 2 * (shape.heads + shape.kv_heads) * shape.head_dim
        if shape.experts:
            inner = shape.experts_per_token * shape.expert_intermediate + shape.shared_intermediate
        else:
            inner = shape.intermediate
        one = tokens * (6 * shape.hidden + (attention + 4 * inner) / tp) * model.compute_bytes
        logits = 4.0 * min(each * self.workload.response_tokens * model.logits_of_a_token(tp), model.logits_at_once)
        layers = -(-shape.layers // pp) * min(count, pp)
        kept = layers * (tokens * shape.hidden * model.compute_bytes if model.recompute else one)
        return kept, one, logits

    def engine_weights(self, model: PlannedModel, layout: tuple[int, int, int], rollout: tuple[int, int]) -> float:
        """Bytes that the engine's weights take beside the trained ones."""
        size = model.params * model.rollout_bytes / (rollout[0] * rollout[1])
        if not model.shares_weights or model.weight_bytes != model.rollout_bytes or model.offload:
            return size
        return size - self._kept(model, layout, rollout)
