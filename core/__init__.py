"""hybridflow.core: the contracts, and what every run shares. Names are imported when they are first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridflow.core.contracts.algorithm import Algorithm
    from hybridflow.core.contracts.capabilities import (
        CommandCapabilities,
        EngineCapabilities,
        RuntimeCapabilities,
        TrainingCapabilities,
        TransportCapabilities,
    )
    from hybridflow.core.contracts.command import Command
    from hybridflow.core.contracts.data_source import DataSource
    from hybridflow.core.contracts.environment import Answer, Environment
    from hybridflow.core.contracts.footprint import Collective, EngineLimits, Execution, Footprint, Phase
    from hybridflow.core.contracts.loss import Counts, Loss, Term
    from hybridflow.core.contracts.planner import Plan, Planner, Prediction
    from hybridflow.core.contracts.protocol import Protocol, TransferProtocol
    from hybridflow.core.contracts.reward import Reward, RewardSample
    from hybridflow.core.contracts.role import Role
    from hybridflow.core.contracts.rollout import Completion, EngineSettings, Request, RolloutEngine, SamplingParams
    from hybridflow.core.contracts.runtime import ResourcePool, Runtime, RuntimeSettings
    from hybridflow.core.contracts.step import StepContext
    from hybridflow.core.contracts.tracker import Tracker
    from hybridflow.core.contracts.training import MicroBatch, OptimizerConfig, TrainingBackend, TrainingSettings
    from hybridflow.core.contracts.transport import Transport
    from hybridflow.core.contracts.worker import RankContext, Worker, register
    from hybridflow.core.errors import HybridFlowError
    from hybridflow.core.groups.group import Pool, WorkerGroup
    from hybridflow.core.launch import load_config, run
    from hybridflow.core.resharding.plan import ReshardPlan, plan_reshard
    from hybridflow.core.values.batch import Batch
    from hybridflow.core.values.columns import Column, tokens
    from hybridflow.core.values.metrics import Metrics
    from hybridflow.core.values.model import ModelSpec
    from hybridflow.core.values.model_shape import ModelShape, ModelSize
    from hybridflow.core.values.parallel import GenerationLayout, ParallelLayout, generation_layout
    from hybridflow.core.values.weights import Box, Param, WeightLayout

_HOME = {
    "errors": ("HybridFlowError",),
    "values.batch": ("Batch",),
    "values.columns": ("Column", "tokens"),
    "values.metrics": ("Metrics",),
    "values.parallel": ("GenerationLayout", "ParallelLayout", "generation_layout"),
    "values.weights": ("Box", "Param", "WeightLayout"),
    "values.model": ("ModelSpec",),
    "values.model_shape": ("ModelShape", "ModelSize"),
    "contracts.role": ("Role",),
    "contracts.step": ("StepContext",),
    "contracts.algorithm": ("Algorithm",),
    "contracts.loss": ("Counts", "Loss", "Term"),
    "contracts.reward": ("Reward", "RewardSample"),
    "contracts.environment": ("Answer", "Environment"),
    "contracts.data_source": ("DataSource",),
    "contracts.capabilities": (
        "CommandCapabilities",
        "EngineCapabilities",
        "RuntimeCapabilities",
        "TrainingCapabilities",
        "TransportCapabilities",
    ),
    "contracts.footprint": ("Collective", "EngineLimits", "Execution", "Footprint", "Phase"),
    "contracts.training": ("MicroBatch", "OptimizerConfig", "TrainingBackend", "TrainingSettings"),
    "contracts.rollout": ("Completion", "EngineSettings", "Request", "RolloutEngine", "SamplingParams"),
    "contracts.runtime": ("ResourcePool", "Runtime", "RuntimeSettings"),
    "contracts.transport": ("Transport",),
    "contracts.protocol": ("Protocol", "TransferProtocol"),
    "contracts.worker": ("RankContext", "Worker", "register"),
    "contracts.tracker": ("Tracker",),
    "contracts.planner": ("Plan", "Planner", "Prediction"),
    "contracts.command": ("Command",),
    "groups.group": ("Pool", "WorkerGroup"),
    "resharding.plan": ("ReshardPlan", "plan_reshard"),
    "launch": ("load_config", "run"),
}
_WHERE = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "Algorithm",
    "Answer",
    "Batch",
    "Box",
    "Collective",
    "Column",
    "Command",
    "CommandCapabilities",
    "Completion",
    "Counts",
    "DataSource",
    "EngineCapabilities",
    "EngineLimits",
    "EngineSettings",
    "Environment",
    "Execution",
    "Footprint",
    "GenerationLayout",
    "HybridFlowError",
    "Loss",
    "Metrics",
    "MicroBatch",
    "ModelShape",
    "ModelSize",
    "ModelSpec",
    "OptimizerConfig",
    "ParallelLayout",
    "Param",
    "Phase",
    "Plan",
    "Planner",
    "Pool",
    "Prediction",
    "Protocol",
    "RankContext",
    "Request",
    "ReshardPlan",
    "ResourcePool",
    "Reward",
    "RewardSample",
    "Role",
    "RolloutEngine",
    "Runtime",
    "RuntimeCapabilities",
    "RuntimeSettings",
    "SamplingParams",
    "StepContext",
    "Term",
    "Tracker",
    "TrainingBackend",
    "TrainingCapabilities",
    "TrainingSettings",
    "TransferProtocol",
    "Transport",
    "TransportCapabilities",
    "WeightLayout",
    "Worker",
    "WorkerGroup",
    "generation_layout",
    "load_config",
    "plan_reshard",
    "register",
    "run",
    "tokens",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"hybridflow.core.{_WHERE[name]}"), name)
