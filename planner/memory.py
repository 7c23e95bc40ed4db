"""Bytes that one model takes on one device (arXiv:2409.19256, section 6): at rest, and more in each phase of a step."""

from __future__ import annotations

import attrs

from hybridflow.core.values.parallel import GenerationLayout, ParallelLayout
from hybridflow.planner.times import Simulator
from hybridflow.planner.workload import PlannedModel


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


@attrs.frozen
class Activations:
    """Bytes of one rank's activations."""

    kept: float
    """What the micro-batches in flight keep for the backward pass."""
    working: float
    """What one layer works with."""
    logits: float
    """The float32 logits of a micro-batch that are there at once."""


@attrs.frozen
class Memory:
    """Of the models of one workload."""

    simulator: Simulator

    def bytes(self, model: PlannedModel, layout: ParallelLayout) -> Bytes:
        workload = self.simulator.workload
        resident = self.simulator.footprint(model, layout, 1).resident
        updates, reads = workload.of(model.name, "train"), workload.of(model.name, "infer")
        training = max(
            (self._update_bytes(model, t.sequences, layout) for t in updates), default=0.0
        )
        inference = max((self._read_bytes(model, t.sequences, layout) for t in reads), default=0.0)
        fetched = resident if model.offload else 0.0
        resident, training, inference = resident - fetched, training + fetched, inference + fetched
        return Bytes(resident, training if updates else 0.0, inference if reads else 0.0, fetched)

    def _read_bytes(self, model: PlannedModel, sequences: int, layout: ParallelLayout) -> float:
        """More while it reads."""
        found = self.activations(model, sequences, layout)
        count, _ = self.simulator.micro_batches(model, sequences, layout.dp)
        gathered = self.simulator.footprint(model, layout, count).reading
        return gathered + max(found.working, self._forward_logits(model, layout.tp, found.logits))

    def _forward_logits(self, model: PlannedModel, tp: int, logits: float) -> float:
        """With their softmax, and under tp what they are gathered from."""
        return logits * (2.0 + (model.execution.gathers_logits and tp > 1) / tp)

    def _update_bytes(self, model: PlannedModel, sequences: int, layout: ParallelLayout) -> float:
        """More while it trains: the most of the moments that its backend tells."""
        tp, runs = layout.tp, model.execution
        count, _ = self.simulator.micro_batches(model, sequences, layout.dp)
        found = self.activations(model, sequences, layout)
        embedding = model.size.embedding_params / tp * runs.compute_bytes * model.size.trained_share
        begun = found.kept + (found.working if runs.recompute else 0.0) + 3.0 * found.logits
        there = {
            "none": 0.0,
            "forward": found.kept + self._forward_logits(model, tp, found.logits),
            "backward": begun + (embedding if found.logits else 0.0),
        }
        phases = self.simulator.footprint(model, layout, count).training
        return max((phase.nbytes + there[phase.activations] for phase in phases), default=0.0)

    def activations(
        self, model: PlannedModel, sequences: int, layout: ParallelLayout
    ) -> Activations:
        """Of a micro-batch of `sequences`.

        A layer with rotary attention and a gated MLP keeps, per token, 10 numbers for each hidden unit (two
        residuals, two norms before and after their weights; queries, keys, values and what attention gives, fewer
        under GQA) and 4 for each intermediate one (gate, its activation, up, their product); attention keeps no
        scores. tp cuts all but the residuals and norms.
        """
        pp, tp, runs = layout.pp, layout.tp, model.execution
        count, each = self.simulator.micro_batches(model, sequences, layout.dp)
        tokens, shape = each * self.simulator.workload.tokens, model.shape
        attention = 2 * (shape.heads + shape.kv_heads) * shape.head_dim
        if shape.experts:
            inner = shape.experts_per_token * shape.expert_intermediate + shape.shared_intermediate
        else:
            inner = shape.intermediate
        one = tokens * (6 * shape.hidden + (attention + 4 * inner) / tp) * runs.compute_bytes
        responses = each * self.simulator.workload.response_tokens
        logits = 4.0 * min(responses * model.logits_of_a_token(tp), runs.logits_at_once)
        layers = -(-shape.layers // pp) * min(count, pp)
        kept = layers * (tokens * shape.hidden * runs.compute_bytes if runs.recompute else one)
        return Activations(kept, one, logits)

    def engine_weights(
        self, model: PlannedModel, layout: ParallelLayout, engines: GenerationLayout
    ) -> float:
        """Bytes that the engine's weights take beside the trained ones."""
        runs, width = model.execution, model.limits.weight_bytes
        size = model.size.params * width / (engines.pp * engines.tp)
        if not runs.shares_weights or runs.weight_bytes != width or model.offload:
            return size
        return size - self.simulator.kept(model, layout, engines)
