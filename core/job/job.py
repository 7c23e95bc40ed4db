"""A job: one algorithm's run, with everything resolved."""

from __future__ import annotations

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
from hybridflow.core.job.schema import (
    EnvironmentSection,
    PlacementSection,
    RewardPart,
    RoleSection,
    RunSection,
    ValidationSection,
)
from hybridflow.core.values.model import ModelSpec
from hybridflow.core.values.parallel import GenerationLayout, ParallelLayout

AUTO = "auto"
"""The name of a transport that is chosen when ranks have met."""


@attrs.frozen
class SyncSpec:
    """How a role's weights come to its rollout engine."""

    transport: str = AUTO
    """A plugin of kind "transport", or "auto"."""
    transport_config: Any = None
    """Its settings."""
    bucket_mb: float = 64.0
    """The most memory that a sync takes for messages on a rank, in 10^6 bytes."""
    alias: bool = True
    """Keep one copy where training and rollout can share it."""
    verify: bool = False
    """Compare checksums of every parameter on both sides after each sync."""

    @property
    def bucket_bytes(self) -> int:
        return int(self.bucket_mb * 1e6)


@attrs.frozen
class TrackerSpec:
    """A tracker and its settings."""

    name: str
    config: Any = None
    """None: its defaults."""


@attrs.frozen
class ModelRole:
    """What a rank must know to build its part of a role."""

    model: ModelSpec
    backend: str
    backend_config: Any
    micro_batch_tokens: int
    optimizer: OptimizerConfig | None = None
    """None: frozen."""
    engine: str | None = None
    engine_config: Any = None
    temperature: float = 1.0
    """Of the policy whose logprobs are meant, in training as in sampling."""
    offload: bool = False
    """Weights and optimizer leave the device while other roles of the pool work."""
    sync: SyncSpec = attrs.field(factory=SyncSpec)
    keep_engine: bool = True
    """The engine's memory stays between generations."""
    logs: str | None = None
    """Folder for the logs of engines in processes of their own."""


@attrs.frozen
class PlacedModel:
    """A model role: what it runs, and where."""

    role: Role
    spec: ModelRole
    layout: ParallelLayout
    pool: str
    section: RoleSection = attrs.field(factory=RoleSection)
    """Its table as it counts: its own, over the actor's where it inherits."""
    generation: GenerationLayout | None = None
    """Of a model that generates: the ranks of `rollout_pool`, or its own, in replicas of the rollout engine."""
    rollout_pool: str | None = None
    """Where its engines run, if not on its own ranks."""


@attrs.frozen
class Rewards:
    """A role that scores by functions."""

    role: Role
    parts: tuple[RewardPart, ...]
    section: RoleSection = attrs.field(factory=RoleSection)


@attrs.frozen
class Job:
    """One algorithm's run (a stage of a configuration, or all of it)."""

    name: str
    stage: str | None
    folder: Path
    run: RunSection
    algorithm_name: str
    algorithm: Algorithm
    runtime: str
    runtime_config: Any
    pools: dict[str, ResourcePool]
    placement: PlacementSection
    planner: str
    """The plugin that plans, "" where there is none."""
    planner_config: Any
    trackers: tuple[TrackerSpec, ...]
    models: dict[str, PlacedModel]
    scorers: dict[str, Rewards]
    """Roles that score by functions."""
    data: DataConfig
    more_data: dict[str, DataConfig]
    """Further data sets that the algorithm asks for."""
    environment: EnvironmentSection | None
    validation: ValidationSection | None
    validation_data: DataConfig | None
    tokenizer: TokenizerConfig
    tokenizer_path: str | None
    sampling: SamplingParams
    device: str
    tables: dict[str, Any]
    """What it was made of."""
    unused: tuple[str, ...] = ()
    """Tables of roles that this algorithm does not have."""
    follows: bool = False
    """Whether its models are of an earlier stage."""

    def plugins(self) -> list[tuple[str, str]]:
        """(kind, name) of the registered plugins that it names; what is named by a path to code is not registered."""
        found = [
            ("runtime", self.runtime),
            ("algorithm", self.algorithm_name),
            ("planner", self.planner),
        ]
        found += [("tracker", tracker.name) for tracker in self.trackers]
        sets = (self.data, self.validation_data, *self.more_data.values())
        found += [("data_source", data.source) for data in sets if data is not None]
        found.append(("tokenizer", self.tokenizer.name or ""))
        found.append(("environment", "" if self.environment is None else self.environment.name))
        found += [
            ("reward", part.function) for scorer in self.scorers.values() for part in scorer.parts
        ]
        for model in self.models.values():
            found.append(("training_backend", model.spec.backend))
            if model.spec.engine is not None:
                found.append(("rollout_engine", model.spec.engine))
            if model.spec.sync.transport != AUTO:
                found.append(("transport", model.spec.sync.transport))
        return [(kind, name) for kind, name in dict.fromkeys(found) if name and ":" not in name]

    def follows_stage(self, earlier: Job) -> bool:
        """Whether its models, or its tokenizer, are those that an earlier stage of the run exports."""
        written = [model.spec.model.export for model in self.models.values()] + [
            self.tokenizer_path
        ]
        return any(path is not None and earlier.folder in Path(path).parents for path in written)

    @property
    def main_pool(self) -> str:
        """Where data, rewards and numerical work live: the actor's pool, or the first."""
        return self.models["actor"].pool if "actor" in self.models else next(iter(self.pools))

    @property
    def rewards(self) -> tuple[RewardPart, ...]:
        """The parts of `reward`, or of the first role that scores by functions."""
        return next(
            (s.parts for s in (self.scorers.get("reward"), *self.scorers.values()) if s), ()
        )
