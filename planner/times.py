"""Simulated seconds of one model's generation, inference and training in one layout.

These are the three simulators of arXiv:2409.19256, section 6 and appendix C. Training and inference
are bound by compute, decoding by the memory's bandwidth. Symbols: p, t and d are the sizes of
pipeline, tensor and data parallelism in training, p_g and t_g those in generation, and m is the
number of micro-batches of a data-parallel rank.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import attrs
import numpy as np

from hybridflow.core.contracts.footprint import Footprint
from hybridflow.core.values.parallel import GenerationLayout, ParallelLayout
from hybridflow.planner.cluster import GB, Nodes
from hybridflow.planner.machine import US, Machine
from hybridflow.planner.tokens import active_params, read_share, trunk_flops
from hybridflow.planner.workload import PlannedModel, Workload


@attrs.frozen
class _Passes:
    """How often a micro-batch goes through a model, counted in forward passes of equal work.

    A backward pass takes as long as one forward pass for the gradients of activations, and as one
    more for those of the weights that are trained.
    """

    forwards: float
    """Forward passes of the layers: 2 with recomputation, which runs them again for gradients."""
    layers: float
    """Forward and backward passes of the layers."""
    head: float
    """Forward and backward passes of the head, which makes logits in pieces again for gradients."""


@attrs.frozen(slots=False)
class Simulator:
    """Seconds of the models of one workload on one kind of nodes."""

    machine: Machine
    workload: Workload

    @classmethod
    def of(cls, nodes: Nodes, workload: Workload) -> Simulator:
        """Return the simulator of these nodes, with their efficiencies."""
        return cls(Machine(nodes), workload)

    @cached_property
    def _footprints(self) -> dict[tuple, Footprint]:
        return {}

    def footprint(
        self, model: PlannedModel, layout: ParallelLayout, micro_batches: int
    ) -> Footprint:
        """Return the memory and the collectives that the model's backend states; it is cached."""
        key = (model, layout.pp, layout.tp, layout.dp, layout.cp, layout.ep, micro_batches)
        if key not in self._footprints:
            self._footprints[key] = model.settings.footprint(
                model.size, layout, model.trained, micro_batches
            )
        return self._footprints[key]

    def micro_batches(self, model: PlannedModel, sequences: int, dp: int) -> tuple[int, int]:
        """Return the number of a data-parallel rank's micro-batches, and the sequences of each."""
        per_rank = -(-sequences // dp)
        # As few as hold all rows. Times are computed as if all were equally large.
        count = -(-per_rank // self._most_in_one(model))
        return count, -(-per_rank // count)

    def largest_micro_batch(self, model: PlannedModel, sequences: int, dp: int) -> int:
        """Return the sequences of the largest micro-batch: all but the last one are full."""
        return min(-(-sequences // dp), self._most_in_one(model))

    def _most_in_one(self, model: PlannedModel) -> int:
        return max(1, int(model.micro_batch_tokens / self.workload.computed(model)))

    def _layer_times(self, model: PlannedModel, tp: int, sequences: int) -> tuple[float, float]:
        """Return the seconds of one layer's forward pass beside its matrix products.

        First those of its tensor-parallel collectives, an all-reduce of the hidden states after
        attention and one after the MLP; then those of launches and element-wise operations.
        """
        e = self.machine.nodes.efficiency
        tokens = sequences * self.workload.computed(model)
        size = tokens * model.shape.hidden * model.execution.compute_bytes

        launches = e.micro_batch_us
        if tp > 1:
            launches += e.tp_layer_us
        rest = launches * US + e.activation_passes * size / self.machine.memory_peak
        return 2.0 * self.machine.all_reduce(size, tp), rest

    def _logits_time(self, model: PlannedModel, tp: int, tokens: int) -> float:
        """Return the seconds of one forward pass's operations on float32 logits, such as their
        softmax.
        """
        size = tokens * model.logits_of_a_token(tp) * 4.0
        return self.machine.nodes.efficiency.logit_passes * size / self.machine.memory_peak

    def _count_passes(
        self, model: PlannedModel, tp: int, response_tokens: int, train: bool
    ) -> _Passes:
        """Return the passes of a micro-batch whose responses have `response_tokens` tokens in all.

        Reading takes 1 of each. With f forward passes of the layers (2 with recomputation) and h of
        the head (2 in pieces), training takes

            layers = f + 1 + trained share        head = h + 2, or h + 1 with adapters
        """
        runs = model.execution
        if not train:
            return _Passes(1.0, 1.0, 1.0)

        forwards = 2.0 if runs.recompute else 1.0
        in_pieces = response_tokens * model.logits_of_a_token(tp) > runs.logits_at_once
        head_forwards = 2.0 if in_pieces else 1.0
        head_backward = 1.0 if runs.adapter_rank else 2.0  # adapters leave the head frozen
        return _Passes(
            forwards,
            forwards + (1.0 + model.size.trained_share),
            head_forwards + head_backward,
        )

    def _passes(
        self,
        model: PlannedModel,
        sequences: int,
        layout: ParallelLayout,
        rate: float,
        train: bool = False,
    ) -> float:
        """Return the seconds of `sequences` through the pipeline: a forward pass, or an update's
        passes.

        m micro-batches occupy p pipeline stages for m + p - 1 turns: m of them, and p - 1 until the
        last stage has its first one (arXiv:2104.04473, section 2.2). So

            seconds = (m + p - 1) * (stage + collectives of a micro-batch) + collectives of a call

        With N tokens in a micro-batch, N_r of them in responses, L layers, a `rate` in operations
        per second of one device, and f, layers and head as `_count_passes` has them, a stage takes

            stage = (layers * N * trunk / p + head * N_r * 2 head weights) / (t * rate)
                    + L / p * ((f + 1) * all-reduces of a layer + layers * rest of a layer)
                    + head * operations on logits
                    + h * gather of the logits over t, where the backend gathers them
                    + 2 * send of the hidden states, where p > 1

        Inference has 1 instead of f + 1 and of 2: there are no gradients. Activation gradients are
        all-reduced whether or not weights are trained, so adapters save products alone.
        """
        pp = layout.pp
        tp = layout.tp
        size = model.size
        runs = model.execution
        count, each = self.micro_batches(model, sequences, layout.dp)
        tokens = each * self.workload.computed(model)
        head_tokens = each * self.workload.response_tokens  # the head sees no other positions
        passes = self._count_passes(model, tp, head_tokens, train)

        # Matrix products: 2 operations per weight and token. All stages are as slow as the last,
        # which has the head.
        flops = passes.layers * tokens * trunk_flops(size, self.workload.attended(model)) / pp
        flops = (flops + passes.head * head_tokens * 2.0 * size.head_params) / tp

        # Layers: the backward pass has as many collectives as one forward pass.
        shared, rest = self._layer_times(model, tp, each)
        repeated = passes.forwards + 1.0 if train else passes.forwards
        layers = model.shape.layers / pp
        stage = flops / rate + layers * (shared * repeated + rest * passes.layers)

        # Logits, and hidden states (backward: their gradients) on their way to the next stage.
        stage += self._logits_time(model, tp, head_tokens) * passes.head
        if pp > 1:
            hidden = tokens * model.shape.hidden * runs.compute_bytes
            stage += (2.0 if train else 1.0) * self.machine.send(hidden, tp)

        # Collectives of the backend for each micro-batch, and once for all of them.
        moves = self.footprint(model, layout, count)
        gathered = self.machine.collectives(moves.forward)
        if train:
            gathered += self.machine.collectives(moves.backward)
        return (count + pp - 1) * (stage + gathered) + self.machine.collectives(moves.call)

    def inference(self, model: PlannedModel, sequences: int, layout: ParallelLayout) -> float:
        """Return the seconds of one forward pass over `sequences`."""
        e = self.machine.nodes.efficiency
        rate = self.machine.flops(model.execution.compute_bytes) * e.inference
        return self._passes(model, sequences, layout, rate) + e.call_ms * 1e-3

    def update(self, model: PlannedModel, sequences: int, layout: ParallelLayout) -> float:
        """Return the seconds of one optimizer step on `sequences`.

        The optimizer is bound by the memory's bandwidth; `traffic` is its bytes read and written
        on a rank (Footprint.step_traffic). `update_ms` holds the dispatch, so call_ms is not added:

            seconds = passes + (1 - overlap) * reduction of gradients + traffic / rate + update_ms
        """
        e = self.machine.nodes.efficiency
        rate = self.machine.flops(model.execution.compute_bytes) * e.training
        time = self._passes(model, sequences, layout, rate, train=True)

        # Gradients and optimizer.
        count, _ = self.micro_batches(model, sequences, layout.dp)
        moves = self.footprint(model, layout, count)
        time += self.machine.collectives(moves.update) * (1.0 - e.overlap)
        return time + moves.step_traffic / self.machine.optimizer_rate + e.update_ms * 1e-3

    def generation(
        self, model: PlannedModel, sequences: int, engines: GenerationLayout, free: Any
    ) -> Any:
        """Return the seconds of generating all responses on all ranks of `engines`.

        `free` bytes of each rank are left for the cache: a number, or an array, which gives an
        array. Infinite where not even one sequence fits.

        Of an engine's n sequences, b are decoded at once, as many as the cache has room for at
        their full length P + R (prompt and response). One token of each takes a decoding step, and
        a sequence that ends makes room for the next, so n / b is not rounded:

            seconds = prefill + n / b * R * step + call_ms
            prefill = n * P * trunk(P) / rate + 2 L * all-reduce(hidden states of n * P) / p_g

        where `rate` is that of the engine's t_g p_g devices. A decoding step reads the weights and
        the cached keys and values, or multiplies, whichever takes longer (the roofline); a
        sequence has P + R / 2 tokens on average, of `cache` bytes each over all layers:

            step = max((weights * share / t_g + b * (P + R / 2) * cache / cut) / bandwidth,
                       b * 2 * active params / rate)
                   + 2 L * all-reduce + p_g * send + launches + work per sequence * b

        and at least L * eager_layer_us for an engine without CUDA graphs.

        `cut` is p_g times min(t_g, kv_heads), and `share` the fraction of the weights that b / p_g
        sequences need (a mixture's experts). Pipeline stages have b / p_g sequences each and pass
        them on, so in one step each stage reads its 1 / p_g of the weights p_g times. Of prefill
        the head, sends between stages and the pipeline's filling are left out.
        """
        w = self.workload
        limits = model.limits
        e = self.machine.nodes.efficiency
        # Sequences of one engine, and how many of them its cache holds.
        per_engine = -(-sequences // (engines.train.world // (engines.pp * engines.tp)))
        fit = self.fit(model, engines, free)
        at_once = np.clip(fit, 1.0, min(per_engine, limits.max_sequences))
        prefill = self.prefill(model, engines, per_engine * w.prompt_tokens)
        step = self.decoding_step(model, engines, at_once)
        seconds = prefill + per_engine / at_once * w.response_tokens * step + e.call_ms * 1e-3
        return np.where(fit >= 1.0, seconds, np.inf)

    def fit(self, model: PlannedModel, engines: GenerationLayout, free: Any) -> Any:
        """Return how many whole sequences a cache of `free` bytes of each rank holds.

        A rank has the keys and values of its pipeline stage; tp cuts them no further than into
        single heads.
        """
        cut = min(engines.tp, model.shape.kv_heads) * engines.pp
        return np.floor_divide(free, model.cache_bytes * self.workload.tokens / cut)

    def prefill(self, model: PlannedModel, engines: GenerationLayout, tokens: float) -> float:
        """Return the seconds in which one engine reads so many tokens of prompts.

        There is an all-reduce after attention and after the MLP of each layer.
        """
        machine = self.machine
        hidden = model.shape.hidden * model.limits.weight_bytes
        read = tokens * trunk_flops(model.size, self.workload.prompt_tokens / 2)
        reduced = model.shape.layers * 2.0 * machine.all_reduce(tokens * hidden, engines.tp)
        return read / self._engine_rate(model, engines) + reduced / engines.pp

    def _engine_rate(self, model: PlannedModel, engines: GenerationLayout) -> float:
        """Return the operations per second of one engine's devices."""
        machine = self.machine
        flops = machine.flops(model.limits.weight_bytes) * machine.nodes.efficiency.inference
        return engines.tp * engines.pp * flops

    def decoding_step(self, model: PlannedModel, engines: GenerationLayout, at_once: Any) -> Any:
        """Return the seconds in which one engine makes a token of each of so many sequences.

        See `generation`.
        """
        pp = engines.pp
        tp = engines.tp
        w = self.workload
        machine = self.machine
        e = machine.nodes.efficiency
        size = model.size
        limits = model.limits
        layers = model.shape.layers
        hidden = model.shape.hidden * limits.weight_bytes  # bytes of a token's hidden state
        rate = self._engine_rate(model, engines)
        cut = min(tp, model.shape.kv_heads) * pp

        # The formula of `generation` ...
        per_stage = np.maximum(1.0, at_once / pp)
        weights = size.params * limits.weight_bytes * read_share(size, per_stage) / tp
        cached = at_once * (w.prompt_tokens + w.response_tokens / 2) * model.cache_bytes / cut
        reads = (weights + cached) / machine.memory_rate
        products = at_once * 2.0 * active_params(size) / rate
        step = np.maximum(reads, products)

        # ... with its collectives, its sends between pipeline stages, and its launches.
        step = step + layers * 2.0 * machine.all_reduce(per_stage * hidden, tp)
        if pp > 1:
            step = step + pp * machine.send(per_stage * hidden, tp)
        step = step + self._engine_overhead(layers, tp, at_once)

        # Without CUDA graphs the device waits where the host launches more slowly than it works.
        if limits.eager and machine.nodes.measured is None:
            step = np.maximum(step, layers * e.eager_layer_us * US)
        return step

    def _engine_overhead(self, layers: int, tp: int, at_once: Any) -> Any:
        """Return the seconds of launches, and of the engine's work per sequence, in one decoding
        step.
        """
        e = self.machine.nodes.efficiency
        layer = e.decode_layer_us
        if tp > 1:
            layer += e.decode_tp_layer_us
        return (e.decode_step_us + layer * layers + e.sequence_us * at_once) * US

    def transition(
        self, model: PlannedModel, layout: ParallelLayout, engines: GenerationLayout
    ) -> float:
        """Return the seconds of bringing the trained weights to the engine.

        All ranks receive at the same time. If one copy of the trained weights lies inside a node

            seconds = sync_ms + received / link

        and else through the network, which the r ranks of a node share: received * r / network.
        What an offloaded model adds is in PoolPlanner.transition.
        """
        # A copy of the weights inside a node comes over its links, any other through the network.
        received = self.received(model, layout, engines)
        fixed = self.machine.nodes.efficiency.sync_ms * 1e-3
        if self.footprint(model, layout, 1).weight_ranks <= self.machine.nodes.per_node:
            return fixed + received / self.machine.link_rate
        return fixed + received * self.machine.nodes.per_node / self.machine.network_rate

    def received(
        self, model: PlannedModel, layout: ParallelLayout, engines: GenerationLayout
    ) -> float:
        """Return the bytes of its generation shard that a rank lacks, with zero-redundancy groups.

        Of a model of M bytes (in the engine's dtype) a rank generates with M / (t_g p_g), and has
        `kept` of it. Where t_g divides t, p_g divides p and nothing is spread over dp, kept is
        M / (t p), and this is the last row of table 2 of arXiv:2409.19256:

            M / (t_g p_g) - M / (t p) = (t p - t_g p_g) / (t_g p_g t p) M

        Groups of neighbours (`consecutive`) are predicted as if they were zero-redundancy groups.
        """
        size = model.size.params * model.limits.weight_bytes
        shard = size / (engines.pp * engines.tp)
        return max(0.0, shard - self.kept(model, layout, engines))

    def kept(self, model: PlannedModel, layout: ParallelLayout, engines: GenerationLayout) -> float:
        """Return the bytes of a rank's training shard that lie in its generation shard.

        Along an axis that both layouts cut, into a and b equal parts of which one number divides
        the other, the smaller part lies in the larger one: 1 / max(a, b) of the axis is shared.
        Other cuts are assumed to share nothing.
        """
        size = float(model.size.params * model.limits.weight_bytes)
        footprint = self.footprint(model, layout, 1)

        # Spread over dp too (FSDP, ZeRO): if the engine's shard is at least as large as the rank's
        # part, the part counts as lying inside it; otherwise nothing is kept.
        if footprint.spread_over_dp:
            ranks = footprint.weight_ranks
            return size / ranks if engines.pp * engines.tp <= ranks else 0.0

        # Cut by pp and tp alone: the rule above, axis by axis.
        share = size
        for trained, generated in ((layout.pp, engines.pp), (layout.tp, engines.tp)):
            if trained % generated and generated % trained:
                return 0.0
            share /= max(trained, generated)
        return share

    def moves(self, model: PlannedModel, layout: ParallelLayout, fetched: float) -> float:
        """Return the seconds in which an offloaded model's `fetched` bytes are copied in and out.

        Each of its calls adds them; 0 for a model that is not offloaded.
        """
        if not model.offload:
            return 0.0
        # In both directions, over the link to the host.
        return 2.0 * fetched / (self.machine.nodes.device.host_gbs * GB)
