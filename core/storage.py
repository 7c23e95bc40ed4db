"""How a training backend keeps a model: what the planner must know of it."""

from __future__ import annotations

import attrs

from hybridflow.core.config.validators import at_least, non_negative

SHARDINGS = ("3d", "3d-zero1", "fsdp", "zero1", "zero2", "zero3")
LOGITS_AT_ONCE = 1 << 28
"""Logits (tokens times vocabulary) that a pass of our backends holds in float32 at once: 1 GiB, and as much again in the
backward, which makes those of a longer micro-batch again."""


@attrs.frozen(slots=False, kw_only=True)
class Storage:
    """How a backend keeps a model; a backend's config class says it with `storage(trained)` (docs/mapping.md).

    `sharding`: "3d": weights, gradients and optimizer over tp and pp; "3d-zero1": the optimizer over dp too; "fsdp" and
    "zero3": everything over tp and dp, gathered layer by layer; "zero2": gradients and optimizer over dp, "zero1": the
    optimizer.
    """

    sharding: str = attrs.field(default="3d", validator=attrs.validators.in_(SHARDINGS))
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
    keeps_gathered: bool = False
    """Weights that were gathered for the forward stay until the backward."""
    whole_below: int = attrs.field(default=0, validator=non_negative)
    """Layers of fewer parameters are gathered all at once and stay until the end of the call."""
    keeps_gradients: bool = False
    """Gradients, and the buffer below, stay between steps."""
    bucket_elements: int = attrs.field(default=0, validator=non_negative)
    """Gradients are reduced, and weights fetched ahead, so many at a time, in a buffer."""
    on_host: bool = False
    """Weights, gradients and optimizer are in the host's memory all the time."""
    adapter_rank: int = attrs.field(default=0, validator=non_negative)
    """LoRA: gradients and optimizer are those of adapters of this rank; 0: of all weights."""
    shares_weights: bool = False
    """What is the same in the engine's weights, of the same dtype, is kept once (arXiv:2409.19256, section 5.3)."""
    moves: bool = True
    """Models with `offload` leave the device."""
    gathers_logits: bool = False
    """Every tp rank has the logits of the whole vocabulary."""
    logits_at_once: int = attrs.field(default=LOGITS_AT_ONCE, validator=at_least(1))
    """Logits of a micro-batch that a rank has at the same time; those of a longer one are made in pieces, in the backward
    again."""
