"""What a step asks of each model: how many sequences it generates, reads and learns from, of which lengths."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, Literal

import attrs

from hybridflow.core.config.validators import at_least, fraction, positive
from hybridflow.core.errors import ConfigError
from hybridflow.core.resharding.shapes import ModelShape
from hybridflow.core.storage import Storage

Verb = Literal["generate", "infer", "train"]
STAGES: tuple[Verb, ...] = ("generate", "infer", "train")
"""A step's stages, one after the other (arXiv:2409.19256, section 2): generation, preparation, training."""
STAGE_NAMES: dict[str, str] = {"generate": "generation", "infer": "inference", "train": "training"}
"""For readers."""

MANY = 1 << 20
"""Of ranks: no limit."""


@attrs.frozen
class Task:
    """Work of one role in a step."""

    role: str
    verb: Verb = attrs.field(validator=attrs.validators.in_(STAGES))
    sequences: int = attrs.field(validator=at_least(1))
    """Of one call."""
    times: int = attrs.field(default=1, validator=at_least(1))
    """Calls: optimizer steps, forward passes, generations."""


@attrs.frozen(slots=False)
class PlannedModel(Storage):
    """A model as the planner sees it: its shape, and how its backend keeps it."""

    name: str
    shape: ModelShape
    trained: bool = attrs.field(default=False, kw_only=True)
    head: Literal["policy", "value"] = attrs.field(default="policy", kw_only=True)
    """policy: logits over the vocabulary; value: one number (critics, reward and cost models)."""
    rollout_bytes: int = attrs.field(default=2, validator=at_least(1), kw_only=True)
    """Of a parameter in the rollout engine, and of an element of its cache."""
    offload: bool = attrs.field(default=False, kw_only=True)
    """Weights and optimizer wait in the host's memory while other models work."""
    micro_batch_tokens: int = attrs.field(default=16384, validator=at_least(1), kw_only=True)
    max_tp: int = attrs.field(default=MANY, validator=at_least(1), kw_only=True)
    max_pp: int = attrs.field(default=MANY, validator=at_least(1), kw_only=True)
    max_rollout_tp: int = attrs.field(default=MANY, validator=at_least(1), kw_only=True)
    max_rollout_pp: int = attrs.field(default=8, validator=at_least(1), kw_only=True)
    takes: Callable[[tuple[int, int, int]], bool] | None = attrs.field(default=None, kw_only=True, eq=False)
    """Whether the backend takes a layout (pp, tp, dp) of this model, beside what the shape says; none: all."""
    max_sequences: int = attrs.field(default=1 << 40, validator=at_least(1), kw_only=True)
    """That an engine decodes at once."""
    engine_share: float = attrs.field(default=1.0, validator=fraction, kw_only=True)
    """Of a device's memory, at most, for an engine's weights and cache."""
    cache_gb: float | None = attrs.field(default=None, validator=positive, kw_only=True)
    """At most for its cache, in 10^9 bytes."""
    cache_tokens: int | None = attrs.field(default=None, validator=at_least(1), kw_only=True)
    """That an engine's cache has room for, at most."""
    keeps_engine: bool = attrs.field(default=False, kw_only=True)
    """The engine's memory, as far as its settings limit it, stays taken while models train."""

    def kept(self, device_gb: float) -> float:
        """Bytes of a device that its engine keeps while models read and train."""
        if not self.keeps_engine:
            return 0.0
        return 1e9 * (self.engine_share * device_gb if self.cache_gb is None else self.cache_gb)

    def shards(self, dp: int) -> int:
        """Ranks that share one copy of what is spread over dp."""
        return max(1, dp // self.replicas)

    @property
    def gathers(self) -> bool:
        """Whether weights are gathered layer by layer."""
        return self.sharding in ("fsdp", "zero3")

    @property
    def gradients_stay(self) -> bool:
        """Between steps: Megatron's are in buffers of their own."""
        return self.pipelined or self.keeps_gradients

    @property
    def gathers_at_once(self) -> bool:
        """Whether all weights are gathered once per call, for all its micro-batches."""
        return self.gathers and self.layer_params < self.whole_below

    @property
    def pipelined(self) -> bool:
        """Whether layers may be cut into stages."""
        return self.sharding.startswith("3d")

    @cached_property
    def layer_params(self) -> int:
        """Of one layer."""
        return sum(_size(shape) for shape in self.shape.layer().values())

    @cached_property
    def params(self) -> int:
        embedding = self.shape.vocab * self.shape.hidden
        heads = embedding * (not self.shape.tied) if self.head == "policy" else self.shape.hidden
        return self.shape.layers * self.layer_params + embedding + heads + self.shape.hidden

    def stage_params(self, pp: int) -> float:
        """Of the largest of `pp` stages: the embedding is in the first, the head in the last."""
        if pp == 1:
            return self.params
        embedding = self.shape.vocab * self.shape.hidden
        return self.shape.layers / pp * self.layer_params + embedding

    @cached_property
    def active_params(self) -> int:
        """That a token is multiplied with, layers and head."""
        s = self.shape
        layer = self.layer_params
        if s.experts:
            expert = 3 * s.hidden * s.expert_intermediate
            layer -= (s.experts - s.experts_per_token) * expert
        return s.layers * layer + self.head_params

    @cached_property
    def trained_share(self) -> float:
        """Of the parameters that have gradients and an optimizer: all, or adapters on every matrix of the layers."""
        if not self.adapter_rank:
            return 1.0
        matrices = [shape for shape in self.shape.layer().values() if len(shape) == 2]
        return min(1.0, self.shape.layers * self.adapter_rank * sum(map(sum, matrices)) / self.params)

    @property
    def head_params(self) -> int:
        return self.shape.hidden * (self.shape.vocab if self.head == "policy" else 1)

    def logits_of_a_token(self, tp: int) -> float:
        """On one rank."""
        return self.shape.vocab / (1 if self.gathers_logits else tp) if self.head == "policy" else 0.0

    def trunk_flops(self, tokens: float) -> float:
        """Of one token of a sequence of `tokens`, without the head: 2 per weight, and causal attention."""
        s = self.shape
        return 2.0 * (self.active_params - self.head_params) + 2.0 * s.layers * s.heads * s.head_dim * tokens

    @property
    def cache_bytes(self) -> int:
        """Of one token's keys and values, all layers."""
        return 2 * self.shape.layers * self.shape.kv_heads * self.shape.head_dim * self.rollout_bytes

    def read_share(self, sequences: Any) -> Any:
        """Share of the weights that a decoding step reads: of a mixture only the experts that its tokens meet."""
        s = self.shape
        if not s.experts:
            return 1.0
        met = 1.0 - (1.0 - s.experts_per_token / s.experts) ** sequences
        experts = s.layers * s.experts * 3 * s.hidden * s.expert_intermediate
        return 1.0 - (1.0 - met) * experts / self.params


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for side in shape:
        size *= side
    return size


@attrs.frozen(slots=False)
class Workload:
    """One step of an algorithm."""

    tasks: tuple[Task, ...]
    prompt_tokens: int = attrs.field(validator=at_least(1))
    """Of a prompt, as long as they get (memory), and on average (time)."""
    response_tokens: int = attrs.field(validator=at_least(1))
    row_bytes: float = attrs.field(default=64.0, validator=positive)
    """Of a token's columns when they go from one pool to another."""

    @property
    def tokens(self) -> int:
        """Of a sequence."""
        return self.prompt_tokens + self.response_tokens

    def of(self, role: str, verb: Verb) -> tuple[Task, ...]:
        return self._by_role.get((role, verb), ())

    @cached_property
    def _by_role(self) -> dict[tuple[str, str], tuple[Task, ...]]:
        found: dict[tuple[str, str], tuple[Task, ...]] = {}
        for task in self.tasks:
            found[task.role, task.verb] = (*found.get((task.role, task.verb), ()), task)
        return found

    def check(self, models: tuple[PlannedModel, ...]) -> None:
        """Raises ConfigError for a task of a role without a model, training of one that is not trained, or a name twice."""
        names = [m.name for m in models]
        problems = [f"two models are called {n!r}" for n in sorted({n for n in names if names.count(n) > 1})]
        problems += [
            f"the workload asks {t.role!r} to {t.verb}, and there is no such model (models: {', '.join(names) or 'none'})"
            for t in self.tasks
            if t.role not in names
        ]
        trained = {m.name for m in models if m.trained}
        problems += [f"the workload trains {t.role!r}, which is frozen" for t in self.tasks
                     if t.verb == "train" and t.role in names and t.role not in trained]  # fmt: skip
        if not models:
            problems.append("there is no model to place")
        if problems:
            raise ConfigError(problems)
