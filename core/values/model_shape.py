"""The sizes of a model: enough to plan for it, without its weights."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from math import prod
from typing import Any, Literal

import attrs
import torch

from hybridflow.core.values.weights import Param

Shape = tuple[int, ...]


@attrs.frozen(eq=False, slots=False)
class ModelShape:
    """A decoder-only transformer of equal layers. Names are those of the saved model; who knows the architecture gives them."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    layer: Mapping[str, Shape]
    """Parameters of one layer, by name behind `layer_prefix`."""
    before: Mapping[str, Shape] = attrs.field(factory=dict)
    """Parameters in front of the layers: the embedding."""
    after: Mapping[str, Shape] = attrs.field(factory=dict)
    """Parameters behind the layers: the last norm, and the head where it is not tied."""
    ties: Mapping[str, str] = attrs.field(factory=dict)
    """Tied name -> the name whose storage it shares."""
    layer_prefix: str = "layers.{}."
    """Of layer N, with its number in place of {}."""
    experts: int = 0
    """Experts of every layer; 0: a dense model."""
    expert_intermediate: int = 0
    shared_intermediate: int = 0
    """Of an expert that every token sees; 0: none."""
    experts_per_token: int = 0
    """Of a mixture: how many experts see a token."""

    @property
    def tied(self) -> bool:
        return bool(self.ties)

    def parameters(self) -> dict[str, Shape]:
        """Canonical name -> shape, in the model's order; tied names are left out."""
        every = dict(self.before)
        for number in range(self.layers):
            prefix = self.layer_prefix.format(number)
            every |= {prefix + name: shape for name, shape in self.layer.items()}
        return every | dict(self.after)

    def params(self, dtype: torch.dtype = torch.bfloat16) -> dict[str, Param]:
        """`parameters`, stored as `dtype`."""
        return {name: Param(shape, dtype) for name, shape in self.parameters().items()}

    def tensor_parallel_problems(self, tp: int) -> list[str]:
        """Why its layers cannot be cut into `tp` parts of whole heads."""
        inner = self.expert_intermediate if self.experts else self.intermediate
        sizes = {"attention heads": self.heads, "intermediate size": inner}
        problems = [
            f"tp {tp} does not divide the {what} {size}"
            for what, size in sizes.items()
            if size % tp
        ]
        if self.kv_heads % tp and tp % self.kv_heads:
            problems.append(
                f"tp {tp} neither divides nor is divided by the {self.kv_heads} key/value heads"
            )
        return problems


@attrs.frozen(eq=False, slots=False)
class ModelSize:
    """How many parameters a model of a shape has, with its head and its adapters."""

    shape: ModelShape
    head: Literal["policy", "value"] = "policy"
    """policy: logits over the vocabulary; value: one number (critics, reward and cost models)."""
    adapter_rank: int = 0
    """LoRA: rank of the adapters that are trained; 0: all weights are."""

    @cached_property
    def layer_params(self) -> int:
        """Of one layer."""
        return sum(prod(shape) for shape in self.shape.layer.values())

    @cached_property
    def embedding_params(self) -> int:
        return self.shape.vocab * self.shape.hidden

    @cached_property
    def head_params(self) -> int:
        return self.shape.hidden * (self.shape.vocab if self.head == "policy" else 1)

    @cached_property
    def params(self) -> int:
        """Of the whole model; a tied head counts once."""
        shape = self.shape
        head = 0 if self.head == "policy" and shape.tied else self.head_params
        return shape.layers * self.layer_params + self.embedding_params + head + shape.hidden

    def stage_params(self, pp: int) -> float:
        """Of the largest of `pp` stages: the embedding is in the first, the head in the last."""
        if pp == 1:
            return self.params
        return self.shape.layers / pp * self.layer_params + self.embedding_params

    @cached_property
    def active_params(self) -> int:
        """That a token is multiplied with, layers and head."""
        shape = self.shape
        layer = self.layer_params
        if shape.experts:
            expert = 3 * shape.hidden * shape.expert_intermediate
            layer -= (shape.experts - shape.experts_per_token) * expert
        return shape.layers * layer + self.head_params

    @cached_property
    def trained_share(self) -> float:
        """Of the parameters that have gradients and an optimizer: all, or adapters on every matrix of the layers."""
        if not self.adapter_rank:
            return 1.0
        matrices = [shape for shape in self.shape.layer.values() if len(shape) == 2]
        return min(
            1.0, self.shape.layers * self.adapter_rank * sum(map(sum, matrices)) / self.params
        )

    def trunk_flops(self, tokens: float) -> float:
        """Of one token of a sequence of `tokens`, without the head: 2 per weight, and causal attention."""
        shape = self.shape
        attention = 2.0 * shape.layers * shape.heads * shape.head_dim * tokens
        return 2.0 * (self.active_params - self.head_params) + attention

    def cache_elements(self) -> int:
        """Of one token's keys and values, all layers."""
        return 2 * self.shape.layers * self.shape.kv_heads * self.shape.head_dim

    def read_share(self, sequences: Any) -> Any:
        """Share of the weights that a decoding step reads: of a mixture only the experts that its tokens meet.

        `sequences` (a number or an array) is how many decode at once.
        """
        shape = self.shape
        if not shape.experts:
            return 1.0
        met = 1.0 - (1.0 - shape.experts_per_token / shape.experts) ** sequences
        experts = shape.layers * shape.experts * 3 * shape.hidden * shape.expert_intermediate
        return 1.0 - (1.0 - met) * experts / self.params
