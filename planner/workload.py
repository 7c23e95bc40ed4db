"""What a step asks of each model: how many sequences it generates, reads and learns from, of which lengths."""

from __future__ import annotations

from functools import cached_property

import attrs

from hybridflow.core.contracts.footprint import EngineLimits, Execution
from hybridflow.core.contracts.planner import STAGES
from hybridflow.core.contracts.training import TrainingSettings
from hybridflow.core.errors import ConfigError
from hybridflow.core.validators import at_least, positive
from hybridflow.core.values.model_shape import ModelShape, ModelSize
from hybridflow.core.values.parallel import ParallelLayout

MANY = 1 << 20
"""Of ranks: no limit."""


@attrs.frozen
class Task:
    """Work of one role in a step."""

    role: str
    verb: str = attrs.field(validator=attrs.validators.in_(STAGES))
    sequences: int = attrs.field(validator=at_least(1))
    """Of one call."""
    times: int = attrs.field(default=1, validator=at_least(1))
    """Calls: optimizer steps, forward passes, generations."""


@attrs.frozen(slots=False, eq=False)
class PlannedModel:
    """A model as the planner sees it: its size, and what its backend and its engine say."""

    name: str
    size: ModelSize
    settings: TrainingSettings = attrs.field(factory=TrainingSettings)
    """Its training backend's."""
    limits: EngineLimits = attrs.field(factory=EngineLimits)
    """Its rollout engine's."""
    trained: bool = attrs.field(default=False, kw_only=True)
    offload: bool = attrs.field(default=False, kw_only=True)
    """Weights and optimizer wait in the host's memory while other models work."""
    micro_batch_tokens: int = attrs.field(default=16384, validator=at_least(1), kw_only=True)
    axes: frozenset[str] = attrs.field(default=frozenset({"dp", "tp", "pp"}), kw_only=True)
    """Parallel axes that its backend has."""
    max_rollout_tp: int = attrs.field(default=MANY, validator=at_least(1), kw_only=True)
    max_rollout_pp: int = attrs.field(default=8, validator=at_least(1), kw_only=True)
    keeps_engine: bool = attrs.field(default=False, kw_only=True)
    """The engine's memory, as far as its settings limit it, stays taken while models train."""

    @property
    def shape(self) -> ModelShape:
        return self.size.shape

    @cached_property
    def execution(self) -> Execution:
        return self.settings.execution(self.trained)

    def takes(self, layout: ParallelLayout) -> bool:
        """Whether its backend takes a layout, beside what the shape says."""
        return self.settings.takes(self.shape, layout)

    def kept(self, device_gb: float) -> float:
        """Bytes of a device that its engine keeps while models read and train."""
        if not self.keeps_engine:
            return 0.0
        share = 1.0 if self.limits.memory_share is None else self.limits.memory_share
        return 1e9 * (share * device_gb if self.limits.cache_gb is None else self.limits.cache_gb)

    def logits_of_a_token(self, tp: int) -> float:
        """On one rank."""
        if self.size.head != "policy":
            return 0.0
        return self.shape.vocab / (1 if self.execution.gathers_logits else tp)

    @property
    def cache_bytes(self) -> int:
        """Of one token's keys and values, all layers."""
        return self.size.cache_elements() * self.limits.weight_bytes


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

    def of(self, role: str, verb: str) -> tuple[Task, ...]:
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
        problems = [
            f"two models are called {n!r}" for n in sorted({n for n in names if names.count(n) > 1})
        ]
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
