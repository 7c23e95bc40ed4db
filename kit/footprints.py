"""Memory and traffic of known shardings of a model: Megatron's 3D parallelism, ZeRO 1 to 3, FSDP2.

A backend's settings derive from KnownSettings and return one of these shardings; any other backend
returns its own Footprint instead. Each sharding cuts over the data-parallel ranks (x):

                            weights     gradients   optimizer
    ThreeD                     -            -        option       arXiv:2104.04473
    Zero, stage 1              -            -           x         arXiv:1910.02054
    Zero, stage 2              -            x           x
    Zero, stage 3              x            x           x
    FullyShardedLayers         x            x           x         arXiv:2304.11277

All of them also cut over tp and pp. With W, G and K bytes per parameter for weights, gradients and
optimizer, N parameters and S ranks that share one copy, a rank holds N / (tp pp) times W, G and K,
each divided by S where the table has an x.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import attrs

from hybridflow.core.contracts.footprint import (
    LOGITS_AT_ONCE,
    CollectiveCost,
    Execution,
    Footprint,
    Phase,
)
from hybridflow.core.contracts.training import Packing, TrainingSettings
from hybridflow.core.validators import at_least, non_negative
from hybridflow.core.values.model_shape import ModelShape, ModelSize
from hybridflow.core.values.parallel import ParallelLayout
from hybridflow.kit.huggingface.models import why_padded
from hybridflow.kit.huggingface.shapes import is_small, shape_of


@attrs.frozen
class Held:
    """Bytes of one rank's weights, gradients and optimizer state."""

    weights: float
    gradients: float
    optimizer: float


@attrs.frozen(kw_only=True, slots=False)
class Sharding(ABC):
    """Common base of the shardings: bytes per parameter, and the ranks that share one copy."""

    # Bytes of numbers
    weight_bytes: int = attrs.field(default=2, validator=at_least(1))
    """Bytes of a parameter as the backend keeps it between steps."""
    gradient_bytes: int = attrs.field(default=4, validator=at_least(1))
    """Bytes of a gradient's element."""
    optimizer_bytes: int = attrs.field(default=12, validator=non_negative)
    """Bytes of optimizer state per parameter: Adam's two moments, and a master copy if there is
    one."""
    compute_bytes: int = attrs.field(default=2, validator=at_least(1))
    """Bytes of an element of an activation, and of a gathered parameter."""

    # Kept tensors, and where they are
    recompute: bool = False
    """Whether only the inputs of layers are kept, and a layer runs again for its gradients."""
    replicas: int = attrs.field(default=1, validator=at_least(1))
    """Number of groups of dp ranks; states are sharded inside a group, and groups hold copies."""
    keeps_gradients: bool = False
    """Whether gradients, and the buffer of `bucket_elements`, stay allocated between steps."""
    bucket_elements: int = attrs.field(default=0, validator=non_negative)
    """Elements of the buffer in which gradients are reduced and weights are fetched ahead."""
    on_host: bool = False
    """Whether weights, gradients and optimizer are in the host's memory all the time."""

    # Computation
    adapter_rank: int = attrs.field(default=0, validator=non_negative)
    """Rank of LoRA adapters, which alone have gradients and optimizer state; 0: no adapters."""
    logits_at_once: int = attrs.field(default=LOGITS_AT_ONCE, validator=at_least(1))
    """Logits (tokens times vocabulary) that a rank computes at once; more are made in pieces."""

    # Beside other models on the device
    moves: bool = True
    """Whether models with `offload` leave the device."""
    shares_weights: bool = False
    """Whether identical shards of trainer and engine (same box and dtype) share one storage."""

    def execution(self, trained: bool) -> Execution:
        """Return how passes are computed, in any layout."""
        return Execution(
            weight_bytes=self.weight_bytes,
            compute_bytes=self.compute_bytes,
            recompute=self.recompute,
            adapter_rank=self.adapter_rank,
            logits_at_once=self.logits_at_once,
            offloads=self.moves,
            from_host=self.on_host or (trained and not self.optimizer_bytes),
            shares_weights=self.shares_weights,
        )

    @abstractmethod
    def footprint(
        self, size: ModelSize, layout: ParallelLayout, trained: bool, micro_batches: int
    ) -> Footprint:
        """Return what a rank holds and moves, as TrainingSettings.footprint does."""

    # --- formulas that the ways share ---

    def shards(self, dp: int) -> int:
        """Return the number of ranks that share one copy of the states that are spread over dp."""
        return max(1, dp // self.replicas)

    def held(
        self, size: ModelSize, layout: ParallelLayout, trained: bool, over_dp: tuple[int, int, int]
    ) -> Held:
        """Return the bytes that one rank holds on its device.

        `over_dp` is 1 or 0 for weights, gradients and optimizer: whether they are spread over dp.
        """
        if self.on_host:
            return Held(0.0, 0.0, 0.0)
        shards = self.shards(layout.dp)

        def per_rank(nbytes: float, spread: int) -> float:
            return nbytes / shards if spread else nbytes

        # The largest pipeline stage counts, since its ranks are the first to run out of memory.
        parameters = size.stage_params(layout.pp) / layout.tp
        learnt = parameters * size.trained_share if trained else 0.0
        weights_spread, gradients_spread, optimizer_spread = over_dp
        return Held(
            weights=per_rank(parameters * self.weight_bytes, weights_spread),
            gradients=per_rank(learnt * self.gradient_bytes, gradients_spread),
            optimizer=per_rank(learnt * self.optimizer_bytes, optimizer_spread),
        )

    def bucket(self, size: ModelSize) -> float:
        """Return the bytes of the buffer for reduced gradients and weights fetched ahead."""
        return min(self.bucket_elements, size.params) * self.compute_bytes

    def resident(self, size: ModelSize, held: Held, trained: bool, gradients_stay: bool) -> float:
        """Return the bytes on the device between calls."""
        # Gradients are dropped after an update, unless the backend keeps them.
        resident = held.weights + held.optimizer
        if gradients_stay:
            buffer = self.bucket(size) if trained else 0.0
            resident += held.gradients + buffer
        return resident

    def reduction(
        self, size: ModelSize, layout: ParallelLayout, times: int = 1, gathers: bool = True
    ) -> tuple[CollectiveCost, ...]:
        """Return the collectives for the gradients of one update.

        Gradients are reduce-scattered over a replica's ranks (`times` in an update). Then they are
        summed over replicas. With `gathers`, for ways with whole weights on every rank, the weights
        are gathered after the optimizer's step.
        """
        # The distance of dp ranks is tp pp: tp and pp vary faster in the usual order of the axes.
        learnt = size.stage_params(layout.pp) / layout.tp * size.trained_share
        stride = layout.tp * layout.pp
        shards = self.shards(layout.dp)
        replicas = layout.dp // shards

        inside = [
            CollectiveCost("reduce_scatter", learnt * self.gradient_bytes, shards, stride, times)
        ]
        if gathers:
            inside.append(CollectiveCost("all_gather", learnt * self.compute_bytes, shards, stride))

        # Each rank sums its own part with the ranks that have that part in other replicas.
        shard_bytes = learnt / shards * self.gradient_bytes
        between = CollectiveCost("all_reduce", shard_bytes, replicas, stride * shards)
        return (*inside, between)

    def step_traffic(self, size: ModelSize, layout: ParallelLayout, shards: int) -> float:
        """Return the bytes that the optimizer's step reads and writes in the device's memory.

        For each parameter that a rank updates, with K, G and W its bytes of optimizer state,
        gradient and weight: 2 K + G + 2 W, as K and W are read and written, and G is read.
        """
        owned = size.stage_params(layout.pp) / layout.tp * size.trained_share / shards
        return owned * (2 * self.optimizer_bytes + self.gradient_bytes + 2 * self.weight_bytes)

    def whole_weights_phases(
        self, size: ModelSize, held: Held, micro_batches: int, gradients_stay: bool, share: int = 1
    ) -> tuple[Phase, ...]:
        """Return the moments of an update with whole weights on every rank.

        Gradients exist from the first backward pass on, so also during the forward pass of every
        micro-batch but the first. Then they are reduced, and each of `share` ranks keeps a part.
        """
        # Gradients that stay are resident already, and count no second time.
        unreduced = 0.0 if gradients_stay else held.gradients
        early = unreduced if micro_batches > 1 else 0.0
        reduced = 2.0 * self.bucket(size) + unreduced / share
        return Phase(early, "forward"), Phase(early, "backward"), Phase(reduced)

    def _weight_gather(self, size: ModelSize, layout: ParallelLayout) -> CollectiveCost:
        """Return the all-gather of one tp rank's weights over the ranks that share them."""
        nbytes = size.params / layout.tp * self.compute_bytes
        return CollectiveCost("all_gather", nbytes, self.shards(layout.dp), layout.tp)


@attrs.frozen(kw_only=True, slots=False)
class ThreeDSharding(Sharding):
    """Megatron's 3D parallelism (arXiv:2104.04473).

    Weights, gradients and optimizer are cut over tp and pp, and whole on every dp rank. Gradients
    have buffers of their own, which stay between steps.
    """

    distributed_optimizer: bool = False
    """Whether the optimizer's state is spread over dp too."""

    def footprint(
        self, size: ModelSize, layout: ParallelLayout, trained: bool, micro_batches: int
    ) -> Footprint:
        """Return what a rank holds and moves, as TrainingSettings.footprint does."""
        # As in the table of the module's docstring.
        over_dp = (0, 0, 1) if self.distributed_optimizer else (0, 0, 0)
        held = self.held(size, layout, trained, over_dp)
        resident = self.resident(size, held, trained, gradients_stay=True)
        ranks = layout.tp * layout.pp
        if not trained:
            return Footprint(resident=resident, weight_ranks=ranks)

        # Without a distributed optimizer every rank updates all parameters, after one all-reduce.
        if self.distributed_optimizer:
            update = self.reduction(size, layout)
            shards = self.shards(layout.dp)
        else:
            learnt = size.stage_params(layout.pp) / layout.tp * size.trained_share
            update = (CollectiveCost("all_reduce", learnt * self.gradient_bytes, layout.dp, ranks),)
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
    """ZeRO (arXiv:1910.02054): the optimizer over dp, then gradients, then weights."""

    stage: int = attrs.field(default=3, validator=attrs.validators.in_((1, 2, 3)))
    """1 spreads the optimizer, 2 gradients too, 3 weights too."""

    def footprint(
        self, size: ModelSize, layout: ParallelLayout, trained: bool, micro_batches: int
    ) -> Footprint:
        """Return what a rank holds and moves, as TrainingSettings.footprint does."""
        spreads = {
            1: (0, 0, 1),
            2: (0, 1, 1),
            3: (1, 1, 1),
        }
        over_dp = spreads[self.stage]
        held = self.held(size, layout, trained, over_dp)
        resident = self.resident(size, held, trained, self.keeps_gradients)
        if self.stage == 3:
            return self._spread(size, layout, trained, micro_batches, resident)

        ranks = layout.tp * layout.pp
        if not trained:
            return Footprint(resident=resident, weight_ranks=ranks)

        # Stage 1 reduces once in an update, stage 2 after every backward pass.
        share = layout.dp if self.stage == 1 else 1
        reductions = micro_batches if self.stage == 2 else 1
        return Footprint(
            resident=resident,
            training=self.whole_weights_phases(
                size, held, micro_batches, self.keeps_gradients, share
            ),
            weight_ranks=ranks,
            update=self.reduction(size, layout, reductions),
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
        """Return the footprint of stage 3.

        Weights are prefetched: as many as the buffer holds, or one layer. In a forward pass the
        buffer of the prefetch counts too.
        """
        # Every micro-batch gathers the weights twice: for its forward and its backward pass.
        shards = self.shards(layout.dp)
        ahead = max(self.bucket(size), size.layer_params * self.compute_bytes)
        gather = self._weight_gather(size, layout)
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
    """FSDP2: everything is spread over tp and dp, and weights are gathered layer by layer.

    Every micro-batch reduces its gradients, so that those of one layer at a time are whole.
    Parameters outside the layers (embedding and head) stay gathered until the last micro-batch is
    over.
    """

    keeps_gathered: bool = False
    """Whether weights that are gathered for the forward pass stay until the backward pass."""
    whole_below: int = attrs.field(default=0, validator=non_negative)
    """Layers with fewer parameters are all gathered at once, and stay until the end of the call."""
    plain_alone: bool = False
    """Whether a single rank computes with its own weights: nothing is gathered or reduced."""

    def footprint(
        self, size: ModelSize, layout: ParallelLayout, trained: bool, micro_batches: int
    ) -> Footprint:
        """Return what a rank holds and moves, as TrainingSettings.footprint does."""
        # Everything is spread over dp.
        held = self.held(size, layout, trained, (1, 1, 1))
        if self.plain_alone and layout.world == 1:
            return self._alone(size, layout, trained, held, micro_batches)
        shards = self.shards(layout.dp)
        at_once = size.layer_params < self.whole_below
        forward, backward = self._gathered(size, layout, shards, at_once)

        # There is no prefetched layer while the head works.
        ahead = 0.0
        begun = 0.0
        if shards > 1 and not at_once:
            ahead = size.layer_params / layout.tp * self.compute_bytes

            # Parameters outside the layers are gathered first, and copied out of the buffer.
            whole = size.params / layout.tp * self.compute_bytes
            begun = 2.0 * (whole - size.shape.layers * ahead) + 2.0 * ahead

        # Weights come once in a call where they stay, else in every pass of every micro-batch.
        gather = (self._weight_gather(size, layout),)
        once = at_once or self.keeps_gathered
        spread: dict[str, Any] = {
            "resident": self.resident(size, held, trained, self.keeps_gradients),
            "reading": forward - ahead,
            "ahead": ahead,
            "begun": begun,
            "weight_ranks": layout.pp * layout.tp * shards,
            "spread_over_dp": True,
            "call": gather if once else (),
            "forward": () if once else gather,
            "backward": () if once else gather,
        }
        if not trained:
            return Footprint(**spread)
        if at_once:
            training = self._phases_at_once(size, layout, held, forward, backward, micro_batches)
        else:
            training = self._phases(size, layout, held, micro_batches, forward, ahead)
            training = (*training, Phase(training[0].nbytes - (forward - ahead) + begun))
        return Footprint(
            **spread,
            training=training,
            update=self.reduction(size, layout, micro_batches, gathers=False),
            step_traffic=self.step_traffic(size, layout, shards),
        )

    def _alone(
        self,
        size: ModelSize,
        layout: ParallelLayout,
        trained: bool,
        held: Held,
        micro_batches: int,
    ) -> Footprint:
        """Return the footprint of a single rank, which has all weights and gathers nothing.

        From the second micro-batch on, each gradient is added to the earlier sum. At the end of a
        backward pass the gradients of embedding and head exist at the same time.
        """
        resident = self.resident(size, held, trained, self.keeps_gradients)
        if not trained:
            return Footprint(resident=resident)
        share = size.trained_share
        earlier = held.gradients if micro_batches > 1 else 0.0
        embedding = size.embedding_params * self.compute_bytes * share
        head = size.head_params * self.compute_bytes * share
        return Footprint(
            resident=resident,
            training=(
                Phase(earlier, "forward"),
                Phase(earlier, "head"),
                Phase(earlier + head, "layer"),
                Phase(held.gradients + embedding + head),
            ),
            step_traffic=self.step_traffic(size, layout, 1),
        )

    def _gathered(
        self, size: ModelSize, layout: ParallelLayout, shards: int, at_once: bool
    ) -> tuple[float, float]:
        """Return the bytes of gathered weights in a forward pass, and in a backward pass.

        One rank alone copies its weights and prefetches nothing. Several ranks also need the
        buffers of the gather: for all weights at once, or for the next layer while one is in use.
        """
        # All weights at once
        weights = size.params / layout.tp * self.compute_bytes
        alone = shards == 1
        if at_once:
            forward = weights if alone else 2.0 * weights
            return forward, weights

        # Layer by layer, beside the parameters outside the layers: embedding and head.
        layer = size.layer_params / layout.tp * self.compute_bytes
        if self.keeps_gathered:
            most = weights if alone else weights + layer
        else:
            outside_layers = weights - size.shape.layers * layer
            most = outside_layers + layer if alone else outside_layers + 2.0 * layer
        return most, most

    def _phases(
        self,
        size: ModelSize,
        layout: ParallelLayout,
        held: Held,
        micro_batches: int,
        gathered: float,
        ahead: float,
    ) -> tuple[Phase, ...]:
        """Return the moments of an update at which a rank may hold most, layer by layer.

        With C and G bytes of an element of a whole gradient, before and in its reduction, and
        beside the gathered weights:

            end of the forward pass     -
            the head's backward pass    -
            of the last layer           C head + C a matrix
            its reduction               C head + (C + G) layer
            of the layer before         C head + C a matrix + G layer
            reduction outside layers    (C + G) of the parameters outside the layers
            a tied table's gradients    3 C table + G layer
            the embedding's, under tp   C (head + table, and the table of all tp ranks) + G layer,
                                        and C table for the sum of tied ones

        From the second micro-batch on a rank's shards of gradients exist too.
        """
        compute = self.compute_bytes
        share = size.trained_share
        layer = size.layer_params / layout.tp
        outside = size.params / layout.tp - size.shape.layers * layer
        head = size.head_params / layout.tp * compute * share
        inner = size.shape.expert_intermediate or size.shape.intermediate
        matrix = size.shape.hidden * inner / layout.tp * compute * share
        reduced = layer * self.gradient_bytes * share

        # Earlier micro-batches leave the shards' gradients, and embedding and head gathered.
        several = micro_batches > 1
        earlier = held.gradients if several else 0.0
        stays = outside * compute if several or self.keeps_gathered else 0.0
        root = outside * share * (compute + self.gradient_bytes)
        phases = [
            Phase(earlier + gathered - ahead, "forward"),
            Phase(earlier + gathered - ahead, "head"),
            Phase(earlier + gathered + head + matrix, "layer"),
            Phase(earlier + gathered + head + layer * compute * share + reduced, "rest"),
            Phase(earlier + gathered + head + matrix + reduced, "next"),
            Phase(held.gradients + stays + root),
        ]
        tied = size.shape.tied and size.head == "policy"
        begun = held.gradients + outside * compute + reduced
        if tied:
            phases.append(Phase(begun + 3.0 * head))

        # A rank of tp makes the gradient of the whole table, and keeps its part.
        if layout.tp > 1:
            table = size.embedding_params * compute * share * (1.0 + 1.0 / layout.tp)
            phases.append(Phase(begun + (2.0 if tied else 1.0) * head + table))
        return tuple(phases)

    def _phases_at_once(
        self,
        size: ModelSize,
        layout: ParallelLayout,
        held: Held,
        forward: float,
        backward: float,
        micro_batches: int,
    ) -> tuple[Phase, ...]:
        """Return the moments of an update at which a rank may hold most, all weights at once.

        These are the end of the forward pass, the beginning of the backward pass, its end (with a
        gradient of the embedding and one of the head), and the reduction of gradients. From the
        second micro-batch on a rank's shards of gradients exist too, and until the last one the
        weights stay gathered.
        """
        # All gradients are whole until all of them are reduced.
        learnt = size.params / layout.tp * size.trained_share
        embedding = size.embedding_params / layout.tp * self.compute_bytes * size.trained_share
        unreduced = learnt * self.compute_bytes
        earlier = held.gradients if micro_batches > 1 else 0.0
        phases = [
            Phase(earlier + forward, "forward"),
            Phase(earlier + backward, "backward"),
            Phase(earlier + backward + unreduced + 2.0 * embedding),
        ]

        # Gradients are copied into a send buffer, and come out as shards (of one rank: whole); gloo
        # reduces in a copy. Of two micro-batches the first has the weights, and the second the
        # earlier shards; of more, those between have both.
        sent = learnt * self.gradient_bytes
        besides = max(backward if micro_batches > 1 else 0.0, earlier)
        if micro_batches > 2:
            besides = backward + earlier
        copies = 2.0 if layout.dp > 1 else 1.0
        phases.append(Phase(besides + unreduced + sent))
        phases.append(Phase(besides + sent * (copies + 1.0 / layout.dp)))
        return tuple(phases)


class KnownSettings(TrainingSettings, ABC):
    """Settings of a backend for Hugging Face models with one of the shardings of this module."""

    recomputes: ClassVar[str] = "activation_checkpointing"
    """Name of the setting that recomputes activations."""

    @classmethod
    def defaults_on(cls, device: str, hf_config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the defaults on CUDA: bfloat16, and recomputation unless the model is small.

        Without recomputation the activations of larger models exceed the memory of most GPUs.
        """
        if device != "cuda":
            return {}
        return {"precision": "bf16", cls.recomputes: not is_small(hf_config)}

    @abstractmethod
    def sharding(self, trained: bool) -> Sharding:
        """Return the sharding of a model by the backend with these settings."""

    def model_shape(self, hf_config: Mapping[str, Any]) -> ModelShape:
        """Return the shape of a Llama-like model; raises ConfigError for any other."""
        return shape_of(hf_config)

    def packing(self, hf_config: Mapping[str, Any]) -> tuple[Packing, str]:
        """Return SHARED for models that can be packed, else PADDED with the reason."""
        reason = why_padded(hf_config)
        return (Packing.SHARED, "") if reason is None else (Packing.PADDED, reason)

    def example_config(
        self, hidden: int, layers: int, vocab: int, heads: int, kv_heads: int
    ) -> dict[str, Any]:
        """Return the fields of a small Qwen2 config, for measurements.

        The intermediate size is 8/3 hidden, a usual ratio, rounded down to a multiple of 64.
        """
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
        """Return how the sharding computes passes."""
        return self.sharding(trained).execution(trained)

    def footprint(
        self, size: ModelSize, layout: ParallelLayout, trained: bool, micro_batches: int
    ) -> Footprint:
        """Return the memory and the traffic of the sharding on a rank."""
        return self.sharding(trained).footprint(size, layout, trained, micro_batches)


@attrs.frozen
class Spread(KnownSettings):
    """Settings of a sharding without a backend, in any layout: for plans and for tests."""

    way: Sharding = attrs.field(factory=ThreeDSharding)
    """The sharding of the model."""

    def sharding(self, trained: bool) -> Sharding:
        """Return the same sharding for trained and frozen models."""
        return self.way

    def takes(self, shape: ModelShape, layout: ParallelLayout) -> bool:
        """Return True: without a backend, any layout can be planned."""
        return True
