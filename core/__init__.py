"""hybridflow.core: the contracts, and what every run shares. Names are imported when they are first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridflow.core.algorithm import Algorithm, Role
    from hybridflow.core.batch import Batch
    from hybridflow.core.columns import Column, tokens
    from hybridflow.core.data import DataSource
    from hybridflow.core.environment import Answer, Environment
    from hybridflow.core.errors import HybridFlowError
    from hybridflow.core.group import Pool, WorkerGroup
    from hybridflow.core.launch import load_config, run
    from hybridflow.core.loss import Counts, Loss, Term
    from hybridflow.core.metrics import Metrics
    from hybridflow.core.parallel import ParallelLayout, generation_layout
    from hybridflow.core.protocols import Protocol, TransferProtocol
    from hybridflow.core.resharding.plan import ReshardPlan, plan_reshard
    from hybridflow.core.resharding.transport import Transport
    from hybridflow.core.rewards import Reward, RewardSample
    from hybridflow.core.rollout import Completion, Request, RolloutEngine, SamplingParams
    from hybridflow.core.runtime import ResourcePool, Runtime
    from hybridflow.core.training import MicroBatch, OptimizerConfig, TrainingBackend
    from hybridflow.core.weights import Box, Param, WeightLayout
    from hybridflow.core.worker import Worker, register

_HOME = {
    "algorithm": ("Algorithm", "Role"),
    "batch": ("Batch",),
    "columns": ("Column", "tokens"),
    "data": ("DataSource",),
    "environment": ("Answer", "Environment"),
    "errors": ("HybridFlowError",),
    "group": ("Pool", "WorkerGroup"),
    "loss": ("Counts", "Loss", "Term"),
    "metrics": ("Metrics",),
    "parallel": ("ParallelLayout", "generation_layout"),
    "protocols": ("Protocol", "TransferProtocol"),
    "resharding.plan": ("ReshardPlan", "plan_reshard"),
    "resharding.transport": ("Transport",),
    "rewards": ("Reward", "RewardSample"),
    "rollout": ("Completion", "Request", "RolloutEngine", "SamplingParams"),
    "runtime": ("ResourcePool", "Runtime"),
    "training": ("MicroBatch", "OptimizerConfig", "TrainingBackend"),
    "weights": ("Box", "Param", "WeightLayout"),
    "worker": ("Worker", "register"),
}
_WHERE = {name: module for module, names in _HOME.items() for name in names} | {
    "load_config": "launch",
    "run": "launch",
}

__all__ = [  # noqa: RUF022  (in the order of the modules)
    "Algorithm", "Role", "Batch", "Column", "tokens", "DataSource", "Answer", "Environment", "HybridFlowError", "Pool",
    "WorkerGroup", "Counts", "Loss", "Term", "Metrics", "ParallelLayout", "generation_layout", "Protocol",
    "TransferProtocol", "ReshardPlan", "plan_reshard", "Transport", "Reward",
    "RewardSample", "Completion", "Request", "RolloutEngine", "SamplingParams", "ResourcePool", "Runtime", "MicroBatch",
    "OptimizerConfig", "TrainingBackend", "Box", "Param", "WeightLayout", "Worker", "register", "load_config", "run",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"hybridflow.core.{_WHERE[name]}"), name)
