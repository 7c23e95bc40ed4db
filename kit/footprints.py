"""Footprints of known ways to spread a model: Megatron's 3D parallelism, ZeRO 1 to 3 (arXiv:1910.02054), FSDP2.

A backend's settings derive from KnownSettings and name the one that is theirs; one with a way of its own returns its own
Footprint instead.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import attrs

from hybridflow.core.contracts.footprint import (
    LOGITS_AT_ONCE,
    Collective,
    Execution,
    Footprint,
    Phase,
)
from hybridflow.core.contracts.training import TrainingSettings
from hybridflow.core.validators import at_least, non_negative
from hybridflow.core.values.model_shape import ModelShape, ModelSize
from hybridflow.core.values.parallel import ParallelLayout
from hybridflow.kit.huggingface.shapes import shape_of


@attrs.frozen
class Held:
    """Bytes of one rank's weights, gradients and optimizer."""

    weights: float
    gradients: float
    optimizer: float


@attrs.frozen(kw_only=True, slots=False)
class Sharding(ABC):
    """What all have in common: the bytes of a parameter, and the ranks that share what is spread."""

    weight_bytes: int = attrs.field(default=2, validator=at_least(1))
    """Of a parameter, as the backend keeps it between steps."""
    gradient_bytes: int = attrs.field(default=4, validator=at_least(1))
    optimizer_bytes: int = attrs.field(default=12, validator=non_negative)
    """Of a parameter: Adam's two moments, and a master copy where there is one."""
    compute_bytes: int = attrs.field(default=2, validator=at_least(1))
    """Of an activation, and of a gathered parameter."""
    recompute: bool = False
    """Keep the layers' inputs alone, and run a layer again for its gradients."""
    replicas: int = attrs.field(default=1, validator=at_least(1))
    """Groups that dp is cut into; what is spread is spread inside a group."""
    keeps_gradients: bool = False
    """Gradients, and the buffer below, stay between steps."""
    bucket_elements: int = attrs.field(default=0, validator=non_negative)
    """Gradients are reduced, and weights fetched ahead, so many at a time, in a buffer."""
    on_host: bool = False
    """Weights, gradients and optimizer are in the host's memory all the time."""
    adapter_rank: int = attrs.field(default=0, validator=non_negative)
    """LoRA: gradients and optimizer are those of adapters of this rank; 0: of all weights."""
    gathers_logits: bool = False
    """Every tp rank has the logits of the whole vocabulary."""
    logits_at_once: int = attrs.field(default=LOGITS_AT_ONCE, validator=at_least(1))
    """Logits of a micro-batch that a rank has at the same time; those of a longer one are made in pieces."""
    moves: bool = True
    """Models with `offload` leave the device."""
    shares_weights: bool = False
    """What is the same in the engine's weights, of the same dtype, is kept once."""

    def execution(self, trained: bool) -> Execution:
        return Execution(
            weight_bytes=self.weight_bytes,
            compute_bytes=self.compute_bytes,
            recompute=self.recompute,
            adapter_rank=self.adapter_rank,
            gathers_logits=self.gathers_logits,
            logits_at_once=self.logits_at_once,
            offloads=self.moves,
            from_host=self.on_host or (trained and not self.optimizer_bytes),
            shares_weights=self.shares_weights,
        )

    @abstractmethod
    def footprint(
        self, size: ModelSize, layout: ParallelLayout, trained: bool, micro_batches: int
    ) -> Footprint:
        """As TrainingSettings.footprint."""

    # What the formulas share
    def shards(self, dp: int) -> int:
        """Ranks that share one copy of what is spread over dp."""
        return max(1, dp // self.replicas)

    def held(
        self, size: ModelSize, layout: ParallelLayout, trained: bool, over_dp: tuple[int, int, int]
    ) -> Held:
        """`over_dp`: whether weights, gradients and the optimizer are spread over dp, 1 or 0 each."""
        if self.on_host:
            return Held(0.0, 0.0, 0.0)
        mine, shards = size.stage_params(layout.pp) / layout.tp, self.shards(layout.dp)
        learnt = mine * size.trained_share * trained
        weights, gradients, optimizer = (
            parameters * width / shards**spread
            for parameters, width, spread in zip(
                (mine, learnt, learnt),
                (self.weight_bytes, self.gradient_bytes, self.optimizer_bytes),
                over_dp,
                strict=True,
            )
        )
        return Held(weights, gradients, optimizer)

    def bucket(self, size: ModelSize) -> float:
        """Bytes of the buffer in which gradients are reduced, and weights fetched ahead."""
        return min(self.bucket_elements, size.params) * self.compute_bytes

    def resident(self, size: ModelSize, held: Held, trained: bool, gradients_stay: bool) -> float:
        resident = held.weights + held.optimizer
        if gradients_stay:
            resident += held.gradients + self.bucket(size) * trained
        return resident

    def reduction(
        self, size: ModelSize, layout: ParallelLayout, times: int = 1, gathers: bool = True
    ) -> tuple[Collective, ...]:
        """Gradients scattered over a replica's ranks (`times` in an update), weights gathered after the step where they are
        whole on every rank, gradients summed over replicas."""
        mine = size.stage_params(layout.pp) / layout.tp * size.trained_share
        step, shards = layout.tp * layout.pp, self.shards(layout.dp)
        found = [Collective("reduce_scatter", mine * self.gradient_bytes, shards, step, times)]
        if gathers:
            found.append(Collective("all_gather", mine * self.compute_bytes, shards, step))
        between = Collective(
            "all_reduce", mine / shards * self.gradient_bytes, layout.dp // shards, step * shards
        )
        return (*found, between)

    def step_traffic(self, size: ModelSize, layout: ParallelLayout, shards: int) -> float:
        """Moments and masters read and written, gradients read, weights read and written."""
        owned = size.stage_params(layout.pp) / layout.tp * size.trained_share / shards
        return owned * (2 * self.optimizer_bytes + self.gradient_bytes + 2 * self.weight_bytes)

    def whole_weights_phases(
        self, size: ModelSize, held: Held, micro_batches: int, gradients_stay: bool, share: int = 1
    ) -> tuple[Phase, ...]:
        """Of an update with whole weights on every rank: gradients from the first backward pass on, then their reduction, in
        which `share` ranks keep a part each."""
        unreduced = 0.0 if gradients_stay else held.gradients
        early = unreduced * (micro_batches > 1)
        reduced = 2.0 * self.bucket(size) + unreduced / share
        return Phase(early, "forward"), Phase(early, "backward"), Phase(reduced)


@attrs.frozen(kw_only=True, slots=False)
class ThreeD(Sharding):
    """Weights, gradients and optimizer over tp and pp, whole on every dp rank (arXiv:2104.04473); gradients have buffers of
    their own, which stay."""

    distributed_optimizer: bool = False
    """The optimizer's state is spread over dp too."""

    def footprint(
        self, size: ModelSize, layout: ParallelLayout, trained: bool, micro_batches: int
    ) -> Footprint:
        over_dp = (0, 0, 1) if self.distributed_optimizer else (0, 0, 0)
        held = self.held(size, layout, trained, over_dp)
        resident = self.resident(size, held, trained, gradients_stay=True)
        ranks = layout.tp * layout.pp
        if not trained:
            return Footprint(resident=resident, weight_ranks=ranks)
        if self.distributed_optimizer:
            update, shards = self.reduction(size, layout), self.shards(layout.dp)
        else:
            mine = size.stage_params(layout.pp) / layout.tp * size.trained_share
            update = (Collective("all_reduce", mine * self.gradient_bytes, layout.dp, ranks),)
            shards = 1
        return Footprint(
            resident=resident,
            training=self.whole_weights_phases(size, held, micro_batches, gradients_stay=True),
            weight_ranks=ranks,
            update=update,
            step_traffic=self.step_traffic(size, layout, shards),
        )


@attrs.frozen(kw_only=True, slots=False)
class Zero(Sharding):
    """ZeRO: the optimizer over dp (stage 1), gradients too (2), weights too (3)."""

    stage: int = attrs.field(default=3, validator=attrs.validators.in_((1, 2, 3)))

    def footprint(
        self, size: ModelSize, layout: ParallelLayout, trained: bool, micro_batches: int
    ) -> Footprint:
        over_dp = {1: (0, 0, 1), 2: (0, 1, 1), 3: (1, 1, 1)}[self.stage]
        held = self.held(size, layout, trained, over_dp)
        resident = self.resident(size, held, trained, self.keeps_gradients)
        if self.stage == 3:
            return self._spread(size, layout, trained, micro_batches, resident)
        ranks = layout.tp * layout.pp
        if not trained:
            return Footprint(resident=resident, weight_ranks=ranks)
        share = layout.dp if self.stage == 1 else 1
        return Footprint(
            resident=resident,
            training=self.whole_weights_phases(
                size, held, micro_batches, self.keeps_gradients, share
            ),
            weight_ranks=ranks,
            update=self.reduction(size, layout, micro_batches if self.stage == 2 else 1),
            step_traffic=self.step_traffic(size, layout, self.shards(layout.dp)),
        )

    def _spread(
        self,
        size: ModelSize,
        layout: ParallelLayout,
        trained: bool,
        micro_batches: int,
        resident: float,
    ) -> Footprint:
        """Weights are fetched ahead by the buffer, or a layer; in a forward pass what they were fetched in is there too."""
        shards = self.shards(layout.dp)
        ahead = max(self.bucket(size), size.layer_params * self.compute_bytes)
        gather = Collective(
            "all_gather", size.params / layout.tp * self.compute_bytes, shards, layout.tp
        )
        spread: dict[str, Any] = {
            "resident": resident,
            "reading": 2.0 * ahead,
            "weight_ranks": layout.pp * layout.tp * shards,
            "spread_over_dp": True,
            "forward": (gather,),
            "backward": (gather,),
        }
        if not trained:
            return Footprint(**spread)
        return Footprint(
            **spread,
            training=(Phase(2.0 * ahead, "forward"), Phase(ahead, "backward")),
            update=self.reduction(size, layout, micro_batches, gathers=False),
            step_traffic=self.step_traffic(size, layout, shards),
        )


@attrs.frozen(kw_only=True, slots=False)
class FullyShardedLayers(Sharding):
    """FSDP2: everything over tp and dp, gathered layer by layer; unsharded gradients while micro-batches add up."""

    keeps_gathered: bool = False
    """Weights that were gathered for the forward stay until the backward."""
    whole_below: int = attrs.field(default=0, validator=non_negative)
    """Layers of fewer parameters are gathered all at once and stay until the end of the call."""

    def footprint(
        self, size: ModelSize, layout: ParallelLayout, trained: bool, micro_batches: int
    ) -> Footprint:
        held = self.held(size, layout, trained, (1, 1, 1))
        shards, at_once = self.shards(layout.dp), size.layer_params < self.whole_below
        forward, backward = self._gathered(size, layout, shards, at_once)
        gather = Collective(
            "all_gather", size.params / layout.tp * self.compute_bytes, shards, layout.tp
        )
        once = at_once or self.keeps_gathered
        spread: dict[str, Any] = {
            "resident": self.resident(size, held, trained, self.keeps_gradients),
            "reading": forward,
            "weight_ranks": layout.pp * layout.tp * shards,
            "spread_over_dp": True,
            "call": (gather,) if once else (),
            "forward": () if once else (gather,),
            "backward": () if once else (gather,),
        }
        if not trained:
            return Footprint(**spread)
        return Footprint(
            **spread,
            training=self._phases(size, layout, held, micro_batches, at_once, forward, backward),
            update=self.reduction(size, layout, gathers=False),
            step_traffic=self.step_traffic(size, layout, shards),
        )

    def _gathered(
        self, size: ModelSize, layout: ParallelLayout, shards: int, at_once: bool
    ) -> tuple[float, float]:
        """Bytes of whole weights in a forward pass, and in a backward pass."""
        whole = size.params / layout.tp * self.compute_bytes
        ranks = shards > 1  # one alone copies its weights, and fetches nothing
        if at_once:
            return (
                1.0 + ranks
            ) * whole, whole  # in a forward pass what they were gathered in is there too
        layer = size.layer_params / layout.tp * self.compute_bytes
        if self.keeps_gathered:
            return whole + ranks * layer, whole + ranks * layer
        others = whole - size.shape.layers * layer
        return others + (1.0 + ranks) * layer, others + (
            1.0 + ranks
        ) * layer  # one at work and the next

    def _phases(
        self, size: ModelSize, layout: ParallelLayout, held: Held, micro_batches: int, at_once: bool,
        forward: float, backward: float,
    ) -> tuple[Phase, ...]:  # fmt: skip
        """The ends of the forward and the beginning of the backward pass; its end, with a gradient of the embedding and of
        the head; the reduction of gradients."""
        whole = size.params / layout.tp * size.trained_share
        embedding = size.embedding_params / layout.tp * self.compute_bytes * size.trained_share
        unreduced = whole * self.compute_bytes if micro_batches > 1 or at_once else held.gradients
        phases = [
            Phase(forward, "forward"),
            Phase(backward, "backward"),
            Phase(backward + unreduced + 2.0 * embedding),
        ]
        if micro_batches > 1:
            phases.append(Phase(backward + unreduced, "backward"))
        if layout.dp > 1 and (micro_batches > 1 or at_once):  # gloo reduces in a copy
            group = 1.0 if at_once else max(size.layer_params, size.head_params) / size.params
            sent = group * whole * self.gradient_bytes
            kept_back = unreduced if group < 1.0 else 0.0
            phases += [Phase(unreduced + sent), Phase(kept_back + sent * (2.0 + 1.0 / layout.dp))]
        return tuple(phases)


class KnownSettings(TrainingSettings, ABC):
    """Settings of a backend for Hugging Face models that spreads them in one of these ways."""

    @abstractmethod
    def sharding(self, trained: bool) -> Sharding:
        """The way, with these settings."""

    def model_shape(self, hf_config: Mapping[str, Any]) -> ModelShape:
        return shape_of(hf_config)

    def example_config(
        self, hidden: int, layers: int, vocab: int, heads: int, kv_heads: int
    ) -> dict[str, Any]:
        return {
            "model_type": "qwen2",
            "vocab_size": vocab,
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "intermediate_size": hidden * 8 // 3 // 64 * 64,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": True,
        }

    def execution(self, trained: bool) -> Execution:
        return self.sharding(trained).execution(trained)

    def footprint(
        self, size: ModelSize, layout: ParallelLayout, trained: bool, micro_batches: int
    ) -> Footprint:
        return self.sharding(trained).footprint(size, layout, trained, micro_batches)


@attrs.frozen
class Spread(KnownSettings):
    """One of the ways by itself, whatever the layout: for plans without a backend, and for tests."""

    way: Sharding = attrs.field(factory=ThreeD)

    def sharding(self, trained: bool) -> Sharding:
        return self.way

    def takes(self, shape: ModelShape, layout: ParallelLayout) -> bool:
        return True
