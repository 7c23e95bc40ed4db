"""Engines that may run in a process of their own."""

from __future__ import annotations

from typing import Any

from hybridflow.core.contracts.rollout import RolloutEngine
from hybridflow.core.contracts.worker import RankContext
from hybridflow.core.values.model import ModelSpec
from hybridflow.kit.hosting.hosted import HostedEngine


class Hostable(RolloutEngine):
    """A base for an engine whose settings derive from ProcessConfig.

    The engine runs in a process of its own where `own_process` says so.
    """

    @classmethod
    def build(
        cls, model: ModelSpec, config: Any, context: RankContext, logs: str | None = None
    ) -> RolloutEngine:
        """Return an engine of this class, or a HostedEngine that runs one elsewhere."""
        if config.own_process:
            return HostedEngine(cls, model, config, context, logs)
        return cls(model, config, context)
