"""Memory and traffic of a model under a backend or an engine, for planning before it is built.

A backend's settings return an Execution and Footprints (see TrainingSettings), an engine's settings
EngineLimits (see EngineSettings). So planners need no code for particular shardings.
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
    """How a backend computes the passes of a model, in any layout."""

    # Numbers in memory
    weight_bytes: int = _count(4)
    """Bytes of a parameter as the backend keeps it between steps."""
    compute_bytes: int = _count(4)
    """Bytes of an activation, and of a gathered parameter."""

    # Passes
    recompute: bool = False
    """Whether only the layers' inputs are kept, and each layer runs again in the backward pass."""
    adapter_rank: int = attrs.field(default=0, validator=non_negative)
    """Rank of LoRA adapters, which alone have gradients and optimizer state; 0: no adapters."""
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
    """Activations that are held as well: "none"; those at the end of the forward pass ("forward");
    or those of the backward pass: the most of them ("backward"), those during the head ("head"),
    the last layer ("layer"), the layer before it ("next"), or between these two layers ("rest")."""


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
    """Bytes in addition to `reading` while the layers are computed, but not during the head."""
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
    """The memory of a device and the requests that a rollout engine's settings allow it."""

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
    """Largest share of a device's memory for weights, cache, and the working memory of a pass."""
    cache_gb: float | None = attrs.field(default=None, validator=positive)
    """Maximum size of the cache, in GB (10^9 bytes)."""
    cache_tokens: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(at_least(1))
    )
    """Number of tokens that the cache has room for."""
    grows: bool = False
    """Whether the cache grows to the needs of a call's requests, up to its limits; else it takes
    the largest size within its limits when the engine starts."""
    stays: bool = False
    """Whether the weights stay on the device even where `generation.keep` is false."""
    prefill_tokens: int = attrs.field(default=0, validator=non_negative)
    """Prompt tokens of one pass, if the working memory of passes is not part of `memory_share`;
    else 0."""
    logit_copies: float = attrs.field(default=0.0, validator=non_negative)
    """Copies of the float32 logits of all sequences that exist while tokens are sampled, if the
    working memory of passes is not part of `memory_share`; else 0."""
    block_tokens: int = _count(1)
    """Size of a cache block in tokens; a sequence takes whole blocks."""
    spare_tokens: int = attrs.field(default=0, validator=non_negative)
    """Tokens beyond a sequence's end for which it also takes cache."""
    graphs_gb: float = attrs.field(default=0.0, validator=non_negative)
    """Memory of CUDA graphs beside the share, in GB."""

    @property
    def unlimited(self) -> bool:
        """Whether there is no limit on the cache's size."""
        return self.memory_share is None and self.cache_gb is None and self.cache_tokens is None


@attrs.frozen(kw_only=True)
class EngineRoom:
    """The memory of a device that its models leave to an engine, in bytes."""

    device: float
    """Bytes of the whole device."""
    share: float
    """Bytes for weights, cache, and the working memory of a pass."""
    cache: float
    """Bytes for the cache alone."""
