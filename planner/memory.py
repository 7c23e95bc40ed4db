"""Bytes that one model takes on one device, at rest and in each phase of a step.

The search (arXiv:2409.19256, section 6) drops layouts that these do not fit. Weights, gradients and
optimizer are as the model's backend states them (its Footprint); activations are counted here.
The models of a pool fit a device if

    sum of resident + largest of (training, inference) of any model <= usable

and an engine's cache gets what is left beside its own weights: of an engine that stays while models
train, what their largest phase leaves (pools.py).
"""

from __future__ import annotations

import attrs

from hybridflow.core.values.model_shape import ModelShape
from hybridflow.core.values.parallel import GenerationLayout, ParallelLayout
from hybridflow.planner.times import Simulator
from hybridflow.planner.workload import PlannedModel


@attrs.frozen
class Bytes:
    """Memory of one device for one model."""

    resident: float
    """Bytes that stay taken between the model's phases."""
    training: float = 0.0
    """Additional bytes while it trains."""
    inference: float = 0.0
    """Additional bytes during a forward-only pass."""
    fetched: float = 0.0
    """The part of `training` and `inference` that an offloaded model copies in from the host."""


@attrs.frozen
class Moment:
    """Additional bytes at one moment of an update."""

    held: float
    """Gradients, gathered weights and buffers."""
    alive: float
    """What autograd keeps, and logits."""

    @property
    def nbytes(self) -> float:
        """All of them."""
        return self.held + self.alive


@attrs.frozen
class Activations:
    """Bytes of one rank's activations for one micro-batch."""

    kept: float
    """Bytes that the micro-batches in flight keep for the backward pass."""
    working: float
    """Bytes that one layer works with."""
    reading: float
    """Bytes that one layer works with where nothing is kept for a backward pass."""
    returning: float
    """Bytes of gradients that one layer's backward pass works with."""
    logits: float
    """Bytes of the float32 logits of a micro-batch that exist at the same time."""


@attrs.frozen
class Memory:
    """Memory that the models of one workload take."""

    simulator: Simulator

    def bytes(self, model: PlannedModel, layout: ParallelLayout) -> Bytes:
        """Return what the model takes on a device at rest, and besides in its largest calls."""
        workload = self.simulator.workload
        # What rests does not depend on the number of micro-batches.
        resident = self.simulator.footprint(model, layout, 1).resident
        updates = workload.of(model.name, "train")
        reads = workload.of(model.name, "infer")

        # The largest of its calls counts.
        moments = [self.fullest(model, t.sequences, layout) for t in updates]
        training = max((moment.nbytes for moment in moments), default=0.0)
        inference = max((self._read_bytes(model, t.sequences, layout) for t in reads), default=0.0)

        # An offloaded model is on the device only while it works. All of it comes in each call,
        # the optimizer too.
        fetched = resident if model.offload else 0.0
        return Bytes(
            resident - fetched,
            training + fetched if updates else 0.0,
            inference + fetched if reads else 0.0,
            fetched,
        )

    def _read_bytes(self, model: PlannedModel, sequences: int, layout: ParallelLayout) -> float:
        """Return the additional bytes during a forward-only pass.

            gathered parameters + max(a layer's activations + the next layer, the head's logits)

        The layer's activations are gone when the head begins.
        """
        activations = self.activations(model, sequences, layout)
        count, _ = self.simulator.micro_batches(model, sequences, layout.dp)

        gathered = self.simulator.footprint(model, layout, count)
        logits = self._forward_logits(model, layout.tp, activations.logits)
        most = gathered.reading + max(activations.reading + gathered.ahead, logits)
        return max(gathered.begun, most)

    def _forward_logits(self, model: PlannedModel, tp: int, logits: float) -> float:
        """Return the bytes of the float32 logits, of their softmax, and of the logits that the head
        made: a copy in another dtype, or a rank's 1 / tp before they are gathered.
        """
        # A copy in float32 stands beside the logits that the head made in another dtype.
        made = model.execution.compute_bytes / 4.0
        if made < 1.0:
            return logits * (2.0 + made)

        # In float32 they are the same tensor, gathered or not.
        gathered = model.execution.gathers_logits and tp > 1
        return logits * (2.0 + (1.0 / tp if gathered else 0.0))

    def fullest(self, model: PlannedModel, sequences: int, layout: ParallelLayout) -> Moment:
        """Return the fullest of the moments of an update that the model's backend names.

        The backend says what parameters and gradients it holds whole at each moment, and which of
        the activations live:

            none        0
            forward     kept + logits, at the end of the forward pass
            head        kept + 3 logits (with softmax and gradient), or the gradient of the head's
                        weights; both where logits are made in pieces
            layer       kept + what the last layer's backward pass works with
            next        the same with a layer less
            rest        kept, with a layer less
            backward    kept + 3 logits + gradient of the head's weights, or as layer
        """
        tp = layout.tp
        runs = model.execution
        count, _ = self.simulator.micro_batches(model, sequences, layout.dp)
        each = self.simulator.largest_micro_batch(model, sequences, layout.dp)
        activations = self.activations(model, sequences, layout)
        kept = activations.kept

        # The head. Its weights' gradient is counted here, since backends do not count it.
        embedding = model.size.embedding_params / tp * runs.compute_bytes * model.size.trained_share
        logits = activations.logits
        tokens = each * self.simulator.workload.response_tokens
        in_pieces = tokens * model.logits_of_a_token(tp) > runs.logits_at_once
        if in_pieces:
            head = 3.0 * logits + embedding
        else:
            made = logits * runs.compute_bytes / 4.0
            head = max(3.0 * logits, made + embedding) if logits else 0.0

        # The layers. Under recomputation one is there again.
        layers = -(-model.shape.layers // layout.pp)
        recomputed = activations.working if runs.recompute else 0.0
        works = kept + recomputed + activations.returning
        less = kept / layers
        alive = {
            "none": 0.0,
            "forward": kept + self._forward_logits(model, tp, logits),
            "head": kept + head,
            "layer": works,
            "next": works - less,
            "rest": kept - less,
            "backward": max(kept + 3.0 * logits + (embedding if logits else 0.0), works),
        }

        # The backend names moments of an update, what it holds then, and which activations live.
        phases = self.simulator.footprint(model, layout, count).training
        moments = [Moment(phase.nbytes, alive[phase.activations]) for phase in phases]
        return max(moments, key=lambda moment: moment.nbytes, default=Moment(0.0, 0.0))

    def activations(
        self, model: PlannedModel, sequences: int, layout: ParallelLayout
    ) -> Activations:
        """Return the bytes of the activations of the largest micro-batch of a call with `sequences`
        in all.

        A layer with rotary attention and a gated MLP keeps these bytes per token, with c bytes of a
        number:

            (8 + 4 c) hidden                    of two norms float32 copies of what they read, and
                                                values before and after their weights
            2 c (heads + kv_heads) head_dim     queries, keys, values, and what attention gives
            4 c intermediate                    gate, its activation, up, their product

        Attention keeps no scores. tp cuts all but the first line:

            layer = tokens * ((8 + 4 c) hidden
                              + c (2 (heads + kv_heads) head_dim + 4 intermediate) / tp)

        A response that shares its prompt has keys and values of both besides, 2 c kv_heads head_dim
        for each of their tokens.

        With recomputation a layer keeps its input alone. A pipeline stage has as many micro-batches
        in flight as there are stages (one forward, one backward: 1F1B). The backward pass of a
        layer has at most the gradients of its result, and of the MLP's units three times, where it
        has given back one of the four. A pass without gradients has the embeddings, what the layer
        reads, what attention added to, and its norm; and of the MLP's units three.
        """
        pp = layout.pp
        tp = layout.tp
        runs = model.execution
        shape = model.shape
        count, _ = self.simulator.micro_batches(model, sequences, layout.dp)
        each = self.simulator.largest_micro_batch(model, sequences, layout.dp)
        tokens = each * self.simulator.workload.computed(model)

        # One layer; of a mixture of experts, the experts that a token meets.
        attention = 2 * (shape.heads + shape.kv_heads) * shape.head_dim
        inner = _inner(shape)
        width = runs.compute_bytes
        layer = tokens * ((8 + 4 * width) * shape.hidden + width * (attention + 4 * inner) / tp)
        if self.simulator.workload.shares(model):
            keys = 2 * shape.kv_heads * shape.head_dim / tp
            layer += each * self.simulator.workload.tokens * width * keys
        reading = tokens * self._reading(model, tp, width)
        returning = tokens * (shape.hidden + 2 * inner / tp) * width

        # The head sees the responses alone; long ones in pieces.
        responses = each * self.simulator.workload.response_tokens
        logits = 4.0 * min(responses * model.logits_of_a_token(tp), runs.logits_at_once)

        # What the micro-batches in flight keep in the layers of the fullest stage.
        layers = -(-shape.layers // pp) * min(count, pp)
        per_layer = tokens * shape.hidden * runs.compute_bytes if runs.recompute else layer
        return Activations(layers * per_layer, layer, reading, returning, logits)

    def engine_weights(
        self, model: PlannedModel, layout: ParallelLayout, engines: GenerationLayout
    ) -> float:
        """Return the bytes that the engine's weights take beside the trained ones.

        Where trainer and engine hold the same part in the same dtype, they share one storage.
        """
        # An offloaded model's weights are not on the device while it generates.
        runs = model.execution
        width = model.limits.weight_bytes
        size = model.size.params * width / (engines.pp * engines.tp)
        if runs.weight_bytes != width or model.offload:
            return size
        if runs.shares_weights:
            return size - self.simulator.kept(model, layout, engines)
        # On one rank each parameter is whole, and may be stored once.
        alone = layout.world == 1 and model.keeps_engine
        return size - (width * model.lent_params if alone else 0)

    def cache_needed(self, model: PlannedModel, engines: GenerationLayout) -> float:
        """Return the bytes of a device's cache with which all sequences are decoded at once.

        With r, the room of a sequence of P + R tokens (rounded up to whole blocks),

            sequences at once * r * bytes of a token / (p_g * min(t_g, kv_heads))
        """
        workload = self.simulator.workload
        block = model.limits.block_tokens
        tokens = workload.tokens + model.limits.spare_tokens
        cut = min(engines.tp, model.shape.kv_heads) * engines.pp
        room = -(-tokens // block) * block * model.cache_bytes / cut
        return self.decoded(model, engines) * room

    def decoded(self, model: PlannedModel, engines: GenerationLayout) -> int:
        """Return how many sequences an engine decodes at once, with a cache for all of them.

        One that no step asks serves validation, with as many as it takes.
        """
        if not self.simulator.workload.of(model.name, "generate"):
            return model.limits.max_sequences
        asked = [task.sequences for task in self.simulator.workload.of(model.name, "generate")]
        replicas = engines.train.world // (engines.pp * engines.tp)
        return min(-(-max(asked, default=0) // replicas), model.limits.max_sequences)

    def generating(self, model: PlannedModel, engines: GenerationLayout) -> float:
        """Return the bytes that an engine's passes work with beside its weights and its cache.

        A pass over prompts has a layer's activations, as any forward pass; while tokens are drawn
        there are copies of the float32 logits of all sequences. An engine whose share of the
        device holds these has neither here.
        """
        limits = model.limits
        decoded = self.decoded(model, engines)
        tokens = min(limits.prefill_tokens, decoded * self.simulator.workload.prompt_tokens)
        layer = tokens * self._reading(model, engines.tp, limits.weight_bytes)
        logits = limits.logit_copies * 4.0 * decoded * model.shape.vocab
        return max(layer, logits) + limits.graphs_gb * 1e9

    def _reading(self, model: PlannedModel, tp: int, width: int) -> float:
        """Return the bytes of a token in a layer that keeps nothing for a backward pass."""
        return (4 * model.shape.hidden + 3 * _inner(model.shape) / tp) * width


def _inner(shape: ModelShape) -> int:
    """Return the units of a layer's MLP; of a mixture those of the experts that a token meets."""
    if not shape.experts:
        return shape.intermediate
    return shape.experts_per_token * shape.expert_intermediate + shape.shared_intermediate
