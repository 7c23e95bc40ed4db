"""A job: one algorithm's run, with everything resolved.

Job
 |- models:  {role: PlacedModel}   a model on a pool, in a parallel layout
 |    `- spec: ModelRole           settings that each of its ranks gets
 |         |- model: ModelSpec     architecture and weights
 |         `- sync, transport      how weights come to the rollout engine
 |- scorers: {role: Rewards}       reward functions, which need no model
 |- pools:   {name: ResourcePool}  the devices that roles share
 `- run, data, sampling, ...       the sections of the configuration
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import attrs

from hybridflow.core.contracts.algorithm import Algorithm
from hybridflow.core.contracts.data_source import DataConfig
from hybridflow.core.contracts.role import Role
from hybridflow.core.contracts.rollout import SamplingParams
from hybridflow.core.contracts.runtime import ResourcePool
from hybridflow.core.contracts.tokenizer import TokenizerConfig
from hybridflow.core.contracts.training import OptimizerConfig
from hybridflow.core.job.sections import (
    EnvironmentSection,
    PlacementSection,
    RewardPart,
    RoleSection,
    RunSection,
    SyncConfig,
    ValidationSection,
)
from hybridflow.core.values.model import ModelSpec
from hybridflow.core.values.parallel import GenerationLayout, ParallelLayout

AUTO = "auto"
"""The transport's name while none is chosen: the ranks choose one when they connect."""


@attrs.frozen
class Chosen:
    """A plugin that the job has chosen, with its settings."""

    name: str
    config: Any = None
    """An instance of its config class; None stands for the defaults."""


@attrs.frozen
class ModelRole:
    """The settings by which a rank builds its part of a role."""

    model: ModelSpec

    # Training and inference.
    backend: str
    backend_config: Any
    """The backend's settings, or None where it has none."""
    micro_batch_tokens: int
    """Tokens of one forward pass, padding included."""
    optimizer: OptimizerConfig | None = None
    """The optimizer; None for a model that is not trained."""

    # Generation.
    engine: str | None = None
    """Name of the rollout engine; None for a model that does not generate."""
    engine_config: Any = None
    temperature: float = 1.0
    """Softmax temperature of the policy, for its logprobs in training as in sampling."""
    offload: bool = False
    """Whether weights and optimizer leave the device while other roles of the pool work."""
    sync: SyncConfig = attrs.field(factory=SyncConfig)
    """Settings of the weight sync to the rollout engine, from the role's table."""
    transport: Chosen = Chosen(AUTO)
    """The transport of the weights: a plugin of kind "transport", or "auto"."""
    keep_engine: bool = True
    """Whether the engine's memory (cache and weights) stays between generations."""
    ahead: bool = False
    """Whether its engine generates ahead, by weights before the present ones."""
    keeps_cache: bool = False
    """Whether responses under way go on with keys and values of older weights."""
    mismatch_stop: float = math.inf
    """The largest mean difference, in nats, of its engine's logprobs from the trainer's."""

    # Observation.
    logs: str | None = None
    """Folder for the logs of engines that run in processes of their own."""


@attrs.frozen
class PlacedModel:
    """A role with a model, and its placement."""

    role: Role
    spec: ModelRole
    layout: ParallelLayout
    """How the ranks of `pool` split the model in training."""
    pool: str
    """Name of the pool on which it is trained and run."""
    section: RoleSection = attrs.field(factory=RoleSection)
    """The role's table, merged over the actor's where the role inherits."""
    generation: GenerationLayout | None = None
    """How the ranks of `rollout_pool`, or of `pool`, form replicas of the rollout engine; None for
    a model that does not generate."""
    rollout_pool: str | None = None
    """Name of the pool on which its engines run, where that is not `pool`."""


@attrs.frozen
class Rewards:
    """A role without a model: its scores are a weighted sum of reward functions."""

    role: Role
    parts: tuple[RewardPart, ...]
    """The functions, with their weights in the sum."""
    pool: str | None = None
    """Name of the pool whose ranks share the rows; None: `Job.reward_pool`."""
    section: RoleSection = attrs.field(factory=RoleSection)


@attrs.frozen
class Job:
    """One algorithm's run: one run stage, or a whole configuration without stages."""

    name: str
    stage: str | None
    """Name of the run stage; None in a configuration without stages."""
    folder: Path
    """Folder of checkpoints, metrics and exports."""
    run: RunSection

    # The plugins that run it, and the devices.
    algorithm_name: str
    """The algorithm's plugin name, or its path to code."""
    algorithm: Algorithm
    runtime: str
    """Name of the runtime that starts the processes."""
    runtime_config: Any
    """The runtime's settings, or None where it has none."""
    pools: dict[str, ResourcePool]
    """The pools by name, at least one."""
    placement: PlacementSection
    planner: str
    """Name of the planner, "" where there is none."""
    planner_config: Any
    """The planner's settings, or None where it has none."""
    trackers: tuple[Chosen, ...]

    models: dict[str, PlacedModel]
    """The roles with models, by name."""
    scorers: dict[str, Rewards]
    """The roles that score by functions, by name."""

    # Data and text.
    data: DataConfig
    more_data: dict[str, DataConfig]
    """Further data sets that the algorithm asks for, by name."""
    environment: EnvironmentSection | None
    """[environment], or None where a response is one turn."""
    validation: ValidationSection | None
    """[validation], or None without validation."""
    validation_data: DataConfig | None
    """The held-out set: [data] with validation.data on top."""
    tokenizer: TokenizerConfig
    """[tokenizer]; without a source where the tokenizer comes from `tokenizer_path`."""
    tokenizer_path: str | None
    """Folder of the models' own tokenizer; None where [tokenizer] gives another, or none exists."""
    sampling: SamplingParams

    # The configuration.
    device: str
    """ "cpu" or "cuda"."""
    tables: dict[str, Any]
    """The tables of the configuration from which the job was resolved."""
    unused: tuple[str, ...] = ()
    """Names of tables of roles that this algorithm does not have."""
    follows: bool = False
    """Whether its models come from an earlier stage."""

    def plugins(self) -> list[tuple[str, str]]:
        """Return (kind, name) of the registered plugins that the job uses, each once.

        Plugins that are given by a path to code are not registered, and left out.
        """
        # Optional plugins have the name "", and are left out at the end.
        plugins = [
            ("runtime", self.runtime),
            ("algorithm", self.algorithm_name),
            ("planner", self.planner),
        ]
        plugins += [("tracker", tracker.name) for tracker in self.trackers]

        sets = (self.data, self.validation_data, *self.more_data.values())
        plugins += [("data_source", data.source) for data in sets if data is not None]
        plugins.append(("tokenizer", self.tokenizer.name or ""))
        plugins.append(("environment", "" if self.environment is None else self.environment.name))

        for scorer in self.scorers.values():
            plugins += [("reward", part.function) for part in scorer.parts]
        for model in self.models.values():
            plugins.append(("training_backend", model.spec.backend))
            if model.spec.engine is not None:
                plugins.append(("rollout_engine", model.spec.engine))
            if model.spec.transport.name != AUTO:
                plugins.append(("transport", model.spec.transport.name))

        return [(kind, name) for kind, name in dict.fromkeys(plugins) if name and ":" not in name]

    def follows_stage(self, earlier: Job) -> bool:
        """Return whether its models or tokenizer come from the exports of the stage `earlier`."""
        # A stage writes both into its own folder, so their paths show it.
        sources = [model.spec.model.export for model in self.models.values()]
        sources.append(self.tokenizer_path)
        return any(path is not None and earlier.folder in Path(path).parents for path in sources)

    @property
    def trained(self) -> list[str]:
        """The roles whose models have an optimizer."""
        return [name for name, model in self.models.items() if model.spec.optimizer is not None]

    @property
    def longest_prompt(self) -> int:
        """The most tokens that a prompt may have, training or held-out; 0 without a limit."""
        limits = [one.max_prompt_tokens for one in (self.data, self.validation_data) if one]
        return max(limits) if all(limits) else 0

    @property
    def replayed(self) -> Path | None:
        """The folder of the run whose responses it gets in the place of engines, with run.replay.

        That of a run with stages is the same stage's.
        """
        if self.run.replay is None:
            return None
        return Path(self.run.replay, self.stage or "")

    @property
    def main_pool(self) -> str:
        """The pool of numerical work, and of rewards without one: the actor's, else the first."""
        if "actor" in self.models:
            return self.models["actor"].pool
        return next((name for name, pool in self.pools.items() if pool.device is None), "main")

    @property
    def untrained_pools(self) -> frozenset[str]:
        """The pools in which no model is trained."""
        trained = {self.models[name].pool for name in self.trained}
        return frozenset(self.pools) - trained

    def residents(self, pool: str) -> frozenset[str]:
        """Return what has workers in a pool: roles, "data", "tasks", and ROLE.rollout for engines.

        Those of a role that are on its own ranks are the role's.
        """
        pools = {name: model.pool for name, model in self.models.items()}
        for name, model in self.models.items():
            if model.rollout_pool is not None:
                pools[f"{name}.rollout"] = model.rollout_pool
        for name, scorer in self.scorers.items():
            pools[name] = scorer.pool or self.reward_pool
        pools |= {"data": self.data_pool, "tasks": self.main_pool}
        return frozenset(name for name, place in pools.items() if place == pool)

    def launched(self, pool: str) -> ResourcePool:
        """Return a pool as it is started: engines that are alone in it need not know each other."""
        spec = self.pools[pool]
        for name, model in self.models.items():
            if self.residents(pool) == {f"{name}.rollout"} and model.generation is not None:
                replicas = range(len(model.generation.replicas))
                groups = tuple(tuple(model.generation.ranks(number)) for number in replicas)
                spec = attrs.evolve(spec, groups=groups)
        return spec

    @property
    def carried(self) -> frozenset[str]:
        """The trained roles whose responses may outlive a generation phase, or newer weights."""
        run = self.run
        never_stops = run.in_flight in ("recompute", "keep") or (
            run.in_flight == "auto" and run.max_staleness > 1
        )
        return frozenset(
            name
            for name, model in self.models.items()
            if run.max_staleness
            and name in self.trained
            and model.spec.engine is not None
            and (model.rollout_pool is None or never_stops)
        )

    @property
    def carried_apart(self) -> frozenset[str]:
        """Those of `carried` whose engines have a pool of their own, and never stop."""
        return frozenset(name for name in self.carried if self.models[name].rollout_pool)

    @property
    def reward_pool(self) -> str:
        """The pool of rewards without one: the main one.

        Where steps are generated ahead it is the engines' own, so that they are scored ahead too;
        the data's, where engines never stop.
        """
        pools = [model.rollout_pool for model in self.models.values() if model.rollout_pool]
        if self.carried_apart and (on_cpus := self._on_cpus):
            return on_cpus[0]
        return pools[0] if self.run.max_staleness and pools else self.main_pool

    @property
    def data_pool(self) -> str:
        """The pool that holds the data: the first one on CPUs, which no model holds up, else that
        of rewards without one."""
        return next(iter(self._on_cpus), self.reward_pool)

    @property
    def _on_cpus(self) -> list[str]:
        return [name for name, pool in self.pools.items() if pool.device == "cpu"]

    @property
    def rewards(self) -> tuple[RewardPart, ...]:
        """The functions of role `reward`, or of the first role that scores by functions."""
        scorers = (self.scorers.get("reward"), *self.scorers.values())
        return next((scorer.parts for scorer in scorers if scorer), ())
