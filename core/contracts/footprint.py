"""What a planner must know of a model under a backend or an engine before the model is built.

A backend's settings return an Execution and Footprints (see TrainingSettings), an engine's settings
EngineLimits (see EngineSettings). So no planner needs to know the name of a sharding.
"""

from __future__ import annotations

from typing import Any, Literal

import attrs

from hybridflow.core.validators import at_least, fraction, non_negative, positive

LOGITS_AT_ONCE = 1 << 28
"""Default of Execution.logits_at_once: 1 GiB of logits in float32, and as much again in the
backward pass."""


def _count(default: int) -> Any:
    """Make a field for a whole number of at least 1."""
    return attrs.field(default=default, validator=at_least(1))


@attrs.frozen(kw_only=True)
class Execution:
    """How a backend computes the passes of a model, whatever the layout."""

    # Numbers in memory
    weight_bytes: int = _count(4)
    """Bytes of a parameter as the backend keeps it between steps."""
    compute_bytes: int = _count(4)
    """Bytes of an activation, and of a gathered parameter."""

    # Passes
    recompute: bool = False
    """Whether only the layers' inputs are kept, and each layer runs again in the backward pass."""
    adapter_rank: int = attrs.field(default=0, validator=non_negative)
    """LoRA: rank of the adapters, which alone have gradients and an optimizer; 0: all weights
    have."""
    gathers_logits: bool = False
    """Whether every tp rank has the logits of the whole vocabulary."""
    logits_at_once: int = _count(LOGITS_AT_ONCE)
    """Largest number of logits (tokens times vocabulary) that a rank holds at once. Those of a
    longer micro-batch are computed in pieces, and again in the backward pass."""

    # Memory outside the passes
    offloads: bool = True
    """Whether models with `offload` leave the device."""
    from_host: bool = False
    """Whether a part of the model lives in host memory and is copied from there in each step."""
    shares_weights: bool = False
    """Whether shards that trainer and engine hold identically (same box, same dtype) share one
    storage (arXiv:2409.19256, section 5.3)."""


@attrs.frozen
class CollectiveCost:
    """A collective operation in which a rank takes part."""

    kind: Literal["all_gather", "reduce_scatter", "all_reduce"]
    nbytes: float
    """Bytes of the whole tensor: the result of an all-gather, the input of the others."""
    ranks: int
    """Number of ranks in the process group."""
    stride: int
    """Distance between neighbouring ranks of the process group, in ranks of the pool."""
    times: int = 1
    """Number of times that it runs in a row."""


@attrs.frozen
class Phase:
    """A moment of an update at which a rank may reach its peak memory."""

    nbytes: float
    """Bytes of weights, gradients and buffers beyond Footprint.resident."""
    activations: Literal["none", "forward", "backward", "head", "layer", "next", "rest"] = "none"
    """Activations that are held as well: none, those at the end of the forward pass ("forward"), or
    of the backward pass: the most of it ("backward"), while the head works ("head"), the last layer
    ("layer"), the layer before it ("next"), or neither, between those two ("rest")."""


@attrs.frozen(kw_only=True)
class Footprint:
    """The memory that a model needs on one rank of a layout, and the bytes that it moves there.

    All sizes are in bytes.
    """

    # Memory
    resident: float
    """Held on the device between calls: weights, optimizer, and gradients and buffers that stay."""
    reading: float = 0.0
    """Additional bytes during a forward-only pass, without activations."""
    ahead: float = 0.0
    """Bytes beside `reading` while the layers work, and not while the head does."""
    begun: float = 0.0
    """Additional bytes when a forward-only pass begins, before there are activations."""
    training: tuple[Phase, ...] = ()
    """Moments of an update; the largest counts."""

    # How the weights are spread
    weight_ranks: int = _count(1)
    """Number of ranks that together hold one copy of the weights."""
    spread_over_dp: bool = False
    """Whether that copy is spread over dp ranks too, not only over tp and pp."""

    # Communication
    call: tuple[CollectiveCost, ...] = ()
    """Collectives once per call (a forward pass over all micro-batches, or an update)."""
    forward: tuple[CollectiveCost, ...] = ()
    """Collectives in the forward pass of each micro-batch."""
    backward: tuple[CollectiveCost, ...] = ()
    """Collectives in the backward pass of each micro-batch."""
    update: tuple[CollectiveCost, ...] = ()
    """Collectives for the gradients of an update; some overlap with the backward pass."""

    # Memory traffic
    step_traffic: float = 0.0
    """Bytes that the optimizer's step reads and writes in device memory."""


@attrs.frozen(kw_only=True)
class EngineLimits:
    """What a rollout engine takes of a device, by its settings."""

    weight_bytes: int = _count(2)
    """Bytes of a parameter in the engine, and of an element of its key/value cache."""
    # Requests
    max_sequences: int = _count(256)
    """Maximum number of sequences decoded concurrently."""
    max_length: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(at_least(1))
    )
    """Maximum number of tokens of a prompt with its response; None: the model's positions."""
    eager: bool = False
    """Whether the host launches each kernel of a decoding step: there are no CUDA graphs."""

    # Memory
    memory_share: float | None = attrs.field(
        default=None, validator=attrs.validators.optional(fraction)
    )
    """Largest share of a device's memory for weights, cache, and what a pass works with."""
    cache_gb: float | None = attrs.field(default=None, validator=positive)
    """Maximum size of the cache, in GB (10^9 bytes)."""
    cache_tokens: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(at_least(1))
    )
    """Number of tokens that the cache has room for."""
    grows: bool = False
    """Whether the cache takes what the requests of a call need, up to its limits; else it takes all
    that they allow when the engine starts."""
    stays: bool = False
    """Whether the weights stay on the device even where `generation.keep` is false."""
    prefill_tokens: int = attrs.field(default=0, validator=non_negative)
    """Tokens of prompts in one pass, of an engine whose passes work beside its share; else 0."""
    logit_copies: float = attrs.field(default=0.0, validator=non_negative)
    """Copies of the float32 logits, of all sequences decoded at once, that exist while tokens are
    drawn, of an engine whose passes work beside its share; else 0."""
    block_tokens: int = _count(1)
    """A sequence's room in the cache is a multiple of this many tokens."""
    spare_tokens: int = attrs.field(default=0, validator=non_negative)
    """Tokens that a sequence may make beyond its end."""
    graphs_gb: float = attrs.field(default=0.0, validator=non_negative)
    """Memory of CUDA graphs beside the share, in GB."""

    @property
    def unlimited(self) -> bool:
        """Whether nothing is said of the cache's size."""
        return self.memory_share is None and self.cache_gb is None and self.cache_tokens is None


@attrs.frozen(kw_only=True)
class EngineRoom:
    """What the models of a device leave to an engine, in bytes."""

    device: float
    """Bytes of the whole device."""
    share: float
    """Bytes for weights, cache, and what a pass works with."""
    cache: float
    """Bytes for the cache alone."""
