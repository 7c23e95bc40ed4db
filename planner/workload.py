"""The work of a step: the sequences that each model generates, reads and learns from."""

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
from hybridflow.planner.tokens import cache_elements

MANY = 1 << 20
"""A number of ranks that is larger than any layout's: no limit."""


@attrs.frozen
class Task:
    """Work of one role in a step."""

    role: str
    verb: str = attrs.field(validator=attrs.validators.in_(STAGES))
    """The step stage it belongs to: "generate", "infer" or "train"."""
    sequences: int = attrs.field(validator=at_least(1))
    """Sequences of one call."""
    times: int = attrs.field(default=1, validator=at_least(1))
    """Number of calls: optimizer steps, forward passes, generations."""
    prompts: int | None = attrs.field(default=None, kw_only=True)
    """Prompts of one call that differ; None: each sequence has its own."""


@attrs.frozen(slots=False, eq=False)
class PlannedModel:
    """The planner's view of a model: its size, and the figures of its backend and its engine."""

    name: str
    size: ModelSize
    settings: TrainingSettings = attrs.field(factory=TrainingSettings)
    """Settings of its training backend."""
    limits: EngineLimits = attrs.field(factory=EngineLimits)
    """Limits of its rollout engine."""
    trained: bool = attrs.field(default=False, kw_only=True)
    offload: bool = attrs.field(default=False, kw_only=True)
    """Whether weights and optimizer wait in the host's memory while other models work."""
    micro_batch_tokens: int = attrs.field(default=16384, validator=at_least(1), kw_only=True)
    """Tokens of a micro-batch, at most; one sequence may have more."""
    axes: frozenset[str] = attrs.field(default=frozenset({"dp", "tp", "pp"}), kw_only=True)
    """Parallel axes that its backend has."""
    shares_prompts: bool = attrs.field(default=False, kw_only=True)
    """Whether its backend computes a prompt once for the sequences of a call that share it."""
    max_rollout_tp: int = attrs.field(default=MANY, validator=at_least(1), kw_only=True)
    """The largest tp of its engine."""
    max_rollout_pp: int = attrs.field(default=8, validator=at_least(1), kw_only=True)
    """The largest pp of its engine."""
    keeps_engine: bool = attrs.field(default=False, kw_only=True)
    """Whether the engine's weights and cache stay on the device while models train."""
    lent_params: int = attrs.field(default=0, kw_only=True)
    """Number of parameters that a trainer on one rank, in the engine's dtype, shares with it."""

    @property
    def shape(self) -> ModelShape:
        """Dimensions of the model's layers."""
        return self.size.shape

    @cached_property
    def execution(self) -> Execution:
        """How the backend computes the model's passes, in any layout."""
        return self.settings.execution(self.trained)

    def takes(self, layout: ParallelLayout) -> bool:
        """Return whether the backend supports a layout; limits of the shape are not checked."""
        return self.settings.takes(self.shape, layout)

    def logits_of_a_token(self, tp: int) -> float:
        """Return the logits that one rank has for a token; 0 for a model without a policy head."""
        if self.size.head != "policy":
            return 0.0
        return self.shape.vocab / tp

    @property
    def cache_bytes(self) -> int:
        """Bytes of one token's keys and values in the engine's cache, all layers."""
        return cache_elements(self.shape) * self.limits.weight_bytes


@attrs.frozen(slots=False)
class Workload:
    """One step of an algorithm."""

    tasks: tuple[Task, ...]
    prompt_tokens: int = attrs.field(validator=at_least(1))
    """Length of a prompt. It stands for the longest (memory) and for the average one (time)."""
    response_tokens: int = attrs.field(validator=at_least(1))
    """Length of a response; it stands for both, too."""
    row_bytes: float = attrs.field(default=64.0, validator=positive)
    """Bytes of a token's columns when they go from one pool to another."""
    open_steps: int = attrs.field(default=1, validator=at_least(1))
    """How many steps' sequences an engine may have at once; with run.max_staleness several."""

    @property
    def tokens(self) -> int:
        """Length of a sequence: a prompt and its response."""
        return self.prompt_tokens + self.response_tokens

    @cached_property
    def prompts_per_sequence(self) -> float:
        """Number of distinct prompts per sequence of a step: 1 / G in groups of G."""
        read = [task for task in self.tasks if task.verb != "generate"]
        sequences = sum(task.sequences * task.times for task in read)
        prompts = sum((task.prompts or task.sequences) * task.times for task in read)
        return prompts / sequences if sequences else 1.0

    def computed(self, model: PlannedModel) -> float:
        """Return the average number of tokens that a model's passes compute for a sequence."""
        return self.prompt_tokens * self._share(model) + self.response_tokens

    def attended(self, model: PlannedModel) -> float:
        """Return the average number of tokens that a computed token attends to.

        A token of a prompt attends to half of it, one of a response to the prompt and half of the
        response: (s P^2 / 2 + R (P + R / 2)) / (s P + R), with s prompts for each sequence.
        """
        prompt, response = self.prompt_tokens, self.response_tokens
        pairs = self._share(model) * prompt**2 / 2 + response * (prompt + response / 2)
        return pairs / self.computed(model)

    def shares(self, model: PlannedModel) -> bool:
        """Return whether several sequences of a call have one prompt, which is computed once."""
        return model.shares_prompts and self.prompts_per_sequence < 1.0

    def _share(self, model: PlannedModel) -> float:
        return self.prompts_per_sequence if model.shares_prompts else 1.0

    def of(self, role: str, verb: str) -> tuple[Task, ...]:
        """Return the tasks of a role in one step stage."""
        return self._by_role.get((role, verb), ())

    @cached_property
    def _by_role(self) -> dict[tuple[str, str], tuple[Task, ...]]:
        tasks: dict[tuple[str, str], tuple[Task, ...]] = {}
        for task in self.tasks:
            key = (task.role, task.verb)
            tasks[key] = (*tasks.get(key, ()), task)
        return tasks

    def check(self, models: tuple[PlannedModel, ...]) -> None:
        """Check that the tasks are of these models.

        Raises ConfigError for a task of a role without a model, for training of a frozen model, for
        two models of one name, and for no models; with all problems.
        """
        # Names are how tasks find their models.
        names = [model.name for model in models]
        twice = sorted({name for name in names if names.count(name) > 1})
        problems = [f"two models are called {name!r}" for name in twice]

        # Every task needs a model ...
        for task in self.tasks:
            if task.role not in names:
                problems.append(
                    f"the workload asks {task.role!r} to {task.verb}, and there is no such model "
                    f"(models: {', '.join(names) or 'none'})"
                )

        # ... and training one that is not frozen.
        trained = {model.name for model in models if model.trained}
        for task in self.tasks:
            if task.verb == "train" and task.role in names and task.role not in trained:
                problems.append(f"the workload trains {task.role!r}, which is frozen")
        if not models:
            problems.append("there is no model to place")
        if problems:
            raise ConfigError(problems)
