"""The work and the memory of one token: operations, weights that are read, keys and values."""

from __future__ import annotations

from typing import Any

from hybridflow.core.values.model_shape import ModelShape, ModelSize


def active_params(size: ModelSize) -> int:
    """Return the number of parameters that a token is multiplied with: layers and head."""
    shape = size.shape
    layer = size.layer_params
    if shape.experts:
        layer -= (shape.experts - shape.experts_per_token) * _expert_params(shape)
    return shape.layers * layer + size.head_params


def trunk_flops(size: ModelSize, attended: float) -> float:
    """Return the floating-point operations of a token's forward pass, without the head.

    A weight costs 2 (multiply and add). A token attends to `attended` others on average, at 2
    operations per element of the heads for its score and 2 for its value:

        2 * weights of the layers + layers * (2 + 2) * heads * head_dim * attended
    """
    shape = size.shape
    attention = 4.0 * shape.layers * shape.heads * shape.head_dim * attended
    return 2.0 * (active_params(size) - size.head_params) + attention


def cache_elements(shape: ModelShape) -> int:
    """Return the number of elements of one token's keys and values, over all layers."""
    return 2 * shape.layers * shape.kv_heads * shape.head_dim


def read_share(size: ModelSize, sequences: Any) -> Any:
    """Return the fraction of the weights that a decoding step reads.

    `sequences` (a number or an array) is how many decode at once. Of a mixture only the experts
    that their tokens are routed to are read. With k of E experts per token and uniform routing,
    an expert is missed by all n sequences with probability (1 - k/E)^n.
    """
    shape = size.shape
    if not shape.experts:
        return 1.0

    used = 1.0 - (1.0 - shape.experts_per_token / shape.experts) ** sequences
    experts = shape.layers * shape.experts * _expert_params(shape)
    return 1.0 - (1.0 - used) * experts / size.params


def _expert_params(shape: ModelShape) -> int:
    """An expert has three matrices: gate, up and down projection."""
    return 3 * shape.hidden * shape.expert_intermediate
