"""Bytes that one model takes on one device, at rest and in each phase of a step.

The search (arXiv:2409.19256, section 6) drops layouts whose bytes do not fit. Weights, gradients
and optimizer are as the model's backend states them (its Footprint); activations are counted here.
The models of a pool fit a device if

    sum of resident + largest of (training, inference) of any model <= usable

and an engine's cache gets the bytes left beside its own weights; if the engine stays while models
train, those that their largest phase leaves (pools.py).
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
    """Bytes that remain allocated between the model's phases."""
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
    """Bytes of gradients, gathered weights and buffers."""
    alive: float
    """Bytes of activations that autograd keeps, and of logits."""

    @property
    def nbytes(self) -> float:
        """All additional bytes."""
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
        """Return the model's bytes on a device at rest, and those added by its largest calls."""
        workload = self.simulator.workload
        # The bytes at rest do not depend on the number of micro-batches.
        resident = self.simulator.footprint(model, layout, 1).resident
        updates = workload.of(model.name, "train")
        reads = workload.of(model.name, "infer")

        # The largest of its calls counts.
        moments = [self.fullest(model, t.sequences, layout) for t in updates]
        training = max((moment.nbytes for moment in moments), default=0.0)
        inference = max((self._read_bytes(model, t.sequences, layout) for t in reads), default=0.0)

        # An offloaded model is on the device only during its calls. Each call copies all of it to
        # the device, the optimizer too.
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
        logits = self._forward_logits(model, activations.logits)
        most = gathered.reading + max(activations.reading + gathered.ahead, logits)
        return max(gathered.begun, most)

    def _forward_logits(self, model: PlannedModel, logits: float) -> float:
        """Return the bytes of logits in a forward pass.

        They are the float32 logits, their softmax, and the head's own output, where it has another
        dtype.
        """
        made = model.execution.compute_bytes / 4.0
        return logits * (2.0 + (made if made < 1.0 else 0.0))

    def fullest(self, model: PlannedModel, sequences: int, layout: ParallelLayout) -> Moment:
        """Return the fullest of the moments of an update that the model's backend names.

        The backend states which parameters and gradients it holds whole at each moment, and which
        of the activations are alive:

            none        0
            forward     kept + logits, at the end of the forward pass
            head        kept + 3 logits (with softmax and gradient), or the gradient of the head's
                        weights; both where logits are made in pieces
            layer       kept + the working memory of the last layer's backward pass
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

        # The layers. With recomputation, the activations of one exist again.
        layers = -(-model.shape.layers // layout.pp)
        recomputed = activations.working if runs.recompute else 0.0
        works = kept + recomputed + activations.returning
        less = kept / layers
        alive = {
            "none": 0.0,
            "forward": kept + self._forward_logits(model, logits),
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
        layer has at most the gradients of its result and three gradients of the MLP's units, when
        one of the four kept tensors of the units is freed. A pass without gradients has four
        tensors of hidden states
        (embeddings, the layer's input, the residual after attention, its norm) and three of the
        MLP's units.
        """
        pp = layout.pp
        tp = layout.tp
        runs = model.execution
        shape = model.shape
        count, _ = self.simulator.micro_batches(model, sequences, layout.dp)
        each = self.simulator.largest_micro_batch(model, sequences, layout.dp)
        tokens = each * self.simulator.workload.computed(model)

        # One layer; in a mixture of experts, the experts that a token is routed to.
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

        # Kept bytes of the micro-batches in flight, in the layers of the fullest stage.
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

        An engine that no step uses serves validation, with as many sequences as its settings allow.
        """
        if not self.simulator.workload.of(model.name, "generate"):
            return model.limits.max_sequences
        workload = self.simulator.workload
        asked = max(task.sequences for task in workload.of(model.name, "generate"))
        replicas = engines.train.world // (engines.pp * engines.tp)
        return min(-(-asked * workload.open_steps // replicas), model.limits.max_sequences)

    def generating(self, model: PlannedModel, engines: GenerationLayout) -> float:
        """Return the bytes of an engine's working memory beside its weights and its cache.

        A pass over prompts has a layer's activations, as any forward pass; while tokens are sampled
        there are copies of the float32 logits of all sequences. Both are 0 for an engine whose own
        share of the device includes them.
        """
        limits = model.limits
        decoded = self.decoded(model, engines)
        tokens = min(limits.prefill_tokens, decoded * self.simulator.workload.prompt_tokens)
        layer = tokens * self._reading(model, engines.tp, limits.weight_bytes)
        logits = limits.logit_copies * 4.0 * decoded * model.shape.vocab
        return max(layer, logits) + limits.graphs_gb * 1e9

    def _reading(self, model: PlannedModel, tp: int, width: int) -> float:
        """Return the bytes of a token's activations in one layer of a pass without gradients."""
        return (4 * model.shape.hidden + 3 * _inner(model.shape) / tp) * width


def _inner(shape: ModelShape) -> int:
    """Return the units of a layer's MLP that a token uses: in a mixture, those of its experts."""
    if not shape.experts:
        return shape.intermediate
    return shape.experts_per_token * shape.expert_intermediate + shape.shared_intermediate
