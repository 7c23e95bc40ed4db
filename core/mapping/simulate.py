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

    @cached_property
    def flops(self) -> float:
        return self.nodes.device.tflops * 1e12

    @cached_property
    def memory_rate(self) -> float:
        return self.nodes.device.bandwidth_gbs * GB * self.nodes.efficiency.memory

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
        """Seconds of the tensor-parallel collectives of one layer's forward, and of its launches."""
        size = sequences * self.workload.tokens * model.shape.hidden * model.compute_bytes
        return 2.0 * self.machine.all_reduce(size, tp), self.machine.nodes.efficiency.micro_batch_us * US

    def _passes(
        self, model: PlannedModel, sequences: int, layout: tuple[int, int, int], passes: float, rate: float
    ) -> float:
        """Seconds of `sequences` through the pipeline; `passes`: forward 1, with backward 3, with recomputation 4."""
        pp, tp, dp = layout
        count, each = self.micro_batches(model, sequences, dp)
        tokens = each * self.workload.tokens
        head = 2.0 * model.head_params
        slowest = (model.forward_flops(self.workload.tokens) - head) / pp + head  # the last stage has the head
        flops = passes * tokens * slowest / tp
        shared, launches = self._layer_times(model, tp, each)
        repeated = 1.0 if passes == 1 else passes - 1  # the backward pass has as many collectives as the forward
        layers = model.shape.layers / pp
        stage = flops / rate + layers * (shared * repeated + launches * passes)
        if pp > 1:
            directions = 1.0 if passes == 1 else 2.0
            stage += directions * self.machine.send(tokens * model.shape.hidden * model.compute_bytes, tp)
        if model.gathers:
            whole = model.params / tp * model.compute_bytes
            stage += (1.0 if passes == 1 else 2.0) * self.machine.gather(whole, dp, tp)
        return (count + pp - 1) * stage

    # Times
    def inference(self, model: PlannedModel, sequences: int, layout: tuple[int, int, int]) -> float:
        e = self.machine.nodes.efficiency
        return self._passes(model, sequences, layout, 1.0, self.machine.flops * e.inference) + e.call_ms * 1e-3

    def update(self, model: PlannedModel, sequences: int, layout: tuple[int, int, int]) -> float:
        """One optimizer step on `sequences`."""
        pp, tp, dp = layout
        e = self.machine.nodes.efficiency
        passes = 4.0 if model.recompute else 3.0
        time = self._passes(model, sequences, layout, passes, self.machine.flops * e.training)
        mine = model.params / (pp * tp)
        step = tp * pp
        if model.sharding == "3d":
            reduction = self.machine.all_reduce(mine * model.gradient_bytes, dp, step)
        else:
            reduction = self.machine.gather(mine * model.gradient_bytes, dp, step)
            if not model.gathers:
                reduction += self.machine.gather(mine * model.compute_bytes, dp, step)
        time += reduction * (1.0 - e.overlap)
        owned = mine if model.sharding == "3d" else mine / dp
        touched = owned * (2 * model.optimizer_bytes + model.gradient_bytes + 2 * model.weight_bytes)
        return time + touched / self.machine.memory_rate + e.update_ms * 1e-3

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
        rate = tp * pp * machine.flops * e.inference
        prefill = mine * w.prompt_tokens * model.forward_flops(w.prompt_tokens) / rate
        prefill += layers * 2.0 * machine.all_reduce(mine * w.prompt_tokens * hidden, tp) / pp
        per_stage = np.maximum(1.0, at_once / pp)
        weights = model.params * model.rollout_bytes * model.read_share(per_stage) / tp
        cached = at_once * (w.prompt_tokens + w.response_tokens / 2) * model.cache_bytes / cut
        step = np.maximum((weights + cached) / machine.memory_rate, at_once * 2.0 * model.active_params / rate)
        step = step + layers * 2.0 * machine.all_reduce(per_stage * hidden, tp)
        if pp > 1:
            step = step + pp * machine.send(per_stage * hidden, tp)
        step = step + (e.decode_step_us + e.decode_layer_us * layers + e.sequence_us * at_once) * US
        seconds = prefill + mine / at_once * w.response_tokens * step + e.call_ms * 1e-3
        return np.where(fit >= 1.0, seconds, np.inf)

    def transition(self, model: PlannedModel, layout: tuple[int, int, int], rollout: tuple[int, int]) -> float:
        """Seconds of bringing trained weights to the engine."""
        received = self.received(model, layout, rollout)
        pp, tp, dp = layout
        spans = dp if model.gathers else 1
        if pp * tp * spans <= self.machine.nodes.per_node:
            return received / self.machine.link_rate
        return received * self.machine.nodes.per_node / self.machine.network_rate

    def received(self, model: PlannedModel, layout: tuple[int, int, int], rollout: tuple[int, int]) -> float:
        """Bytes that a rank lacks of its generation shard: under zero-redundancy grouping (t p - t_g p_g) / (t_g p_g t p) M."""
        size = model.params * model.rollout_bytes
        return max(0.0, size / (rollout[0] * rollout[1]) - self._kept(model, layout, rollout))

    def _kept(self, model: PlannedModel, layout: tuple[int, int, int], rollout: tuple[int, int]) -> float:
        """Bytes of a rank's training shard that lie in its generation shard."""
        pp, tp, dp = layout
        size = model.params * model.rollout_bytes
        if model.gathers:
            return size / (pp * tp * dp) if rollout[0] * rollout[1] <= pp * tp * dp else 0.0
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
        mine = model.params / (pp * tp)
        learnt = mine * model.trained_share * model.trained
        shards = max(1, dp // model.replicas)
        every = zip((mine, learnt, learnt), (model.weight_bytes, model.gradient_bytes, model.optimizer_bytes),
                    _OVER_DP[model.sharding], strict=True)  # fmt: skip
        return tuple(parameters * size / shards**spread for parameters, size, spread in every)

    def bytes(self, model: PlannedModel, layout: tuple[int, int, int]) -> Bytes:
        tp = layout[1]
        weights, gradients, optimizer = (0.0, 0.0, 0.0) if model.on_host else self._held(model, layout)
        gathered = 0.0
        if model.gathers:
            largest = 2.0 * max(model.layer_params, model.shape.vocab * model.shape.hidden)
            gathered = (model.params if model.keeps_gathered else largest) / tp * model.compute_bytes
        buffers = gradients if model.pipelined else 0.0  # Megatron's stay
        resident, training, inference = weights + optimizer + buffers, gathered + gradients - buffers, gathered
        if model.offload:
            resident, training, inference = 0.0, training + resident, inference + weights
        updates, reads = self.workload.of(model.name, "train"), self.workload.of(model.name, "infer")
        training += max((self.activations(model, t.sequences, layout, True) for t in updates), default=0.0)
        inference += max((self.activations(model, t.sequences, layout, False) for t in reads), default=0.0)
        return Bytes(resident, training if updates else 0.0, inference if reads else 0.0)

    def moves(self, model: PlannedModel, layout: tuple[int, int, int]) -> tuple[float, float]:
        """Seconds of a step that an offloaded model's weights, and what it trains with, take from the host (and back)."""
        if not model.offload:
            return 0.0, 0.0
        weights, _, optimizer = self._held(model, layout)
        rate = self.machine.nodes.device.host_gbs * GB
        return weights / rate, 2.0 * (weights + optimizer) / rate

    def activations(self, model: PlannedModel, sequences: int, layout: tuple[int, int, int], train: bool) -> float:
        """Of one rank's micro-batches in flight, and the logits of one (arXiv:2205.05198: 34 bytes per token and hidden unit
        of a layer in 16 bits with attention that keeps no scores; of those 24 are cut by tp)."""
        pp, tp, dp = layout
        count, each = self.micro_batches(model, sequences, dp)
        tokens, hidden = each * self.workload.tokens, model.shape.hidden
        one = tokens * hidden * (10 + 24 / tp) * model.compute_bytes / 2
        logits = tokens * model.shape.vocab / tp * 4 if model.head == "policy" else 0.0
        if not train:
            return one + logits
        layers = -(-model.shape.layers // pp)
        in_flight = min(count, pp)
        if model.recompute:
            kept = in_flight * layers * tokens * hidden * model.compute_bytes + one
        else:
            kept = in_flight * layers * one
        return kept + 2.0 * logits

    def engine_weights(self, model: PlannedModel, layout: tuple[int, int, int], rollout: tuple[int, int]) -> float:
        """Bytes that the engine's weights take beside the trained ones: what is the same in both is kept once where the
        backend keeps whole tensors of the engine's dtype."""
        size = model.params * model.rollout_bytes / (rollout[0] * rollout[1])
        if model.gathers or model.weight_bytes != model.rollout_bytes or model.offload:
            return size
        return size - self._kept(model, layout, rollout)
