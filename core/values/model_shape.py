"""The sizes of a model: enough to plan for it, without its weights.

A ModelShape says which parameters a model has; a ModelSize counts them, with a head and adapters.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from math import prod
from typing import Literal

import attrs
import torch

from hybridflow.core.values.weights import Param

Shape = tuple[int, ...]
"""The shape of a parameter."""


@attrs.frozen(eq=False, slots=False)
class ModelShape:
    """The shape of a decoder-only transformer of equal layers.

    Names are those of the saved model. A backend that knows the architecture makes it.
    """

    # Sizes
    hidden: int
    """Hidden size: width of the activations between layers."""
    layers: int
    heads: int
    """Query heads of a layer's attention."""
    kv_heads: int
    """Key/value heads of a layer's attention."""
    head_dim: int
    """Width of one head."""
    intermediate: int
    """Intermediate size of a dense layer's MLP."""
    vocab: int
    """Number of embeddings."""

    # Parameters
    layer: Mapping[str, Shape]
    """Parameters of one layer, by name after `layer_prefix`."""
    before: Mapping[str, Shape] = attrs.field(factory=dict)
    """Parameters before the layers: the embedding."""
    after: Mapping[str, Shape] = attrs.field(factory=dict)
    """Parameters after the layers: the last norm, and the head where it is not tied."""
    ties: Mapping[str, str] = attrs.field(factory=dict)
    """Tied name -> the name whose storage it shares."""
    layer_prefix: str = "layers.{}."
    """Prefix of a layer's parameters, in which {} is replaced by the layer's number."""

    # A mixture of experts
    experts: int = 0
    """Experts of every layer; 0: a dense model."""
    expert_intermediate: int = 0
    """Intermediate size of one expert."""
    shared_intermediate: int = 0
    """Intermediate size of an expert that every token uses; 0: there is none."""
    experts_per_token: int = 0
    """Number of experts that a token is routed to."""

    @property
    def tied(self) -> bool:
        """Whether parameters share storage (the head and the embedding)."""
        return bool(self.ties)

    def parameters(self) -> dict[str, Shape]:
        """Return canonical name -> shape, in the model's order; tied names are left out."""
        # The order in which a model runs: embedding, layers, head.
        parameters = dict(self.before)
        for number in range(self.layers):
            prefix = self.layer_prefix.format(number)
            parameters |= {prefix + name: shape for name, shape in self.layer.items()}
        return parameters | dict(self.after)

    def params(self, dtype: torch.dtype = torch.bfloat16) -> dict[str, Param]:
        """Return `parameters`, stored as `dtype`."""
        return {name: Param(shape, dtype) for name, shape in self.parameters().items()}

    def tensor_parallel_problems(self, tp: int) -> list[str]:
        """List why the layers cannot be cut into `tp` parts of whole heads."""
        # Experts are cut like a dense MLP, each along its own intermediate size.
        inner = self.expert_intermediate if self.experts else self.intermediate
        sizes = {"attention heads": self.heads, "intermediate size": inner}
        problems = [
            f"tp {tp} does not divide the {name} {size}"
            for name, size in sizes.items()
            if size % tp
        ]

        # With more ranks than key/value heads, several ranks have a copy of the same head.
        if self.kv_heads % tp and tp % self.kv_heads:
            problems.append(
                f"tp {tp} neither divides nor is divided by the {self.kv_heads} key/value heads"
            )
        return problems


@attrs.frozen(eq=False, slots=False)
class ModelSize:
    """The number of parameters of a model, with its head and its adapters."""

    shape: ModelShape
    head: Literal["policy", "value"] = "policy"
    """"policy": logits over the vocabulary; "value": one number (critics, reward and cost
    models)."""
    adapter_rank: int = 0
    """LoRA: rank of the adapters that are trained; 0: all weights are trained."""

    # --- numbers of parameters ---

    @cached_property
    def layer_params(self) -> int:
        """The number of parameters of one layer."""
        return sum(prod(shape) for shape in self.shape.layer.values())

    @cached_property
    def embedding_params(self) -> int:
        """The number of parameters of the embedding."""
        return self.shape.vocab * self.shape.hidden

    @cached_property
    def head_params(self) -> int:
        """The number of parameters of the head, tied or not."""
        return self.shape.hidden * (self.shape.vocab if self.head == "policy" else 1)

    @cached_property
    def params(self) -> int:
        """The number of parameters of the whole model; a tied head counts once."""
        # The last term is the norm in front of the head.
        shape = self.shape
        head = 0 if self.head == "policy" and shape.tied else self.head_params
        return shape.layers * self.layer_params + self.embedding_params + head + shape.hidden

    def stage_params(self, pp: int) -> float:
        """Return the number of parameters of the largest of `pp` pipeline stages.

        The embedding is in the first one, the head in the last.
        """
        if pp == 1:
            return self.params
        return self.shape.layers / pp * self.layer_params + self.embedding_params

    @cached_property
    def trained_share(self) -> float:
        """The fraction of the parameters that has gradients and an optimizer.

        It is 1 without adapters. An adapter of rank r on an [m, n] matrix of a layer has r (m + n)
        parameters.
        """
        if not self.adapter_rank:
            return 1.0
        matrices = [shape for shape in self.shape.layer.values() if len(shape) == 2]
        adapters = self.shape.layers * self.adapter_rank * sum(map(sum, matrices))
        return min(1.0, adapters / self.params)
