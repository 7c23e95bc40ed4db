"""What a planner must know of a model under a backend or an engine before it is built: bytes held, bytes moved, limits.

A backend's settings return these (TrainingSettings, EngineSettings); no planner knows the name of a sharding.
"""

from __future__ import annotations

from typing import Literal

import attrs

from hybridflow.core.validators import at_least, fraction, non_negative, positive

LOGITS_AT_ONCE = 1 << 28
"""Logits (tokens times vocabulary) of a pass in float32 at once: 1 GiB, and as much again in the backward, which makes those
of a longer micro-batch again."""


@attrs.frozen(kw_only=True)
class Execution:
    """How a backend computes the passes of a model, whatever the layout."""

    weight_bytes: int = attrs.field(default=4, validator=at_least(1))
    """Of a parameter, as the backend keeps it between steps."""
    compute_bytes: int = attrs.field(default=4, validator=at_least(1))
    """Of an activation, and of a gathered parameter."""
    recompute: bool = False
    """Keep the layers' inputs alone, and run a layer again for its gradients."""
    adapter_rank: int = attrs.field(default=0, validator=non_negative)
    """LoRA: gradients and optimizer are those of adapters of this rank; 0: of all weights."""
    gathers_logits: bool = False
    """Every tp rank has the logits of the whole vocabulary."""
    logits_at_once: int = attrs.field(default=LOGITS_AT_ONCE, validator=at_least(1))
    """Logits of a micro-batch that a rank has at the same time; those of a longer one are made in pieces, in the backward
    again."""
    offloads: bool = True
    """Models with `offload` leave the device."""
    from_host: bool = False
    """Something of it is in the host's memory all the time, and comes from there in each step."""
    shares_weights: bool = False
    """What is the same in the engine's weights, of the same dtype, is kept once (arXiv:2409.19256, section 5.3)."""


@attrs.frozen
class Collective:
    """A collective operation in which a rank takes part."""

    kind: Literal["all_gather", "reduce_scatter", "all_reduce"]
    nbytes: float
    """Of the whole tensor: what an all-gather ends with, what the others begin with."""
    ranks: int
    """Of the group."""
    stride: int
    """Between neighbouring ranks of the group, in ranks of the pool."""
    times: int = 1
    """How often in a row."""


@attrs.frozen
class Phase:
    """A moment of an update at which a rank may hold the most."""

    nbytes: float
    """Weights, gradients and buffers beyond what is at rest."""
    activations: Literal["none", "forward", "backward"] = "none"
    """What is there beside: nothing; activations as the forward pass ends; as the backward pass begins."""


@attrs.frozen(kw_only=True)
class Footprint:
    """What a model takes on one rank of a layout, and what it moves there. All sizes in bytes."""

    resident: float
    """On the device between calls: weights, optimizer, and what gradients and buffers stay."""
    reading: float = 0.0
    """More in a forward-only pass, without activations."""
    training: tuple[Phase, ...] = ()
    """Moments of an update; the largest counts."""
    weight_ranks: int = attrs.field(default=1, validator=at_least(1))
    """Ranks that hold one copy of the weights together."""
    spread_over_dp: bool = False
    """Whether that copy is spread over dp ranks too, not over tp and pp alone."""
    call: tuple[Collective, ...] = ()
    """Once in a call (a forward pass over all micro-batches, or an update)."""
    forward: tuple[Collective, ...] = ()
    """In the forward pass of each micro-batch."""
    backward: tuple[Collective, ...] = ()
    """In the backward pass of each micro-batch."""
    update: tuple[Collective, ...] = ()
    """For the gradients of an update, some of it while the backward pass goes on."""
    step_traffic: float = 0.0
    """Read and written in the device's memory by the optimizer's step."""


@attrs.frozen(kw_only=True)
class EngineLimits:
    """What a rollout engine takes, as its settings say."""

    weight_bytes: int = attrs.field(default=2, validator=at_least(1))
    """Of a parameter in the engine, and of an element of its cache."""
    max_sequences: int = attrs.field(default=256, validator=at_least(1))
    """Sequences decoded at once."""
    max_length: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(at_least(1))
    )
    """Tokens of a prompt with its response, at most; None: as many as the model has positions for."""
    memory_share: float | None = attrs.field(
        default=None, validator=attrs.validators.optional(fraction)
    )
    """Share of a device's memory, at most, for weights and cache."""
    cache_gb: float | None = attrs.field(default=None, validator=positive)
    """10^9 bytes for the cache, at most."""
    cache_tokens: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(at_least(1))
    )
    """Tokens that the cache has room for."""
