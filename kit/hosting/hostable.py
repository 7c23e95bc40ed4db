"""Engines that may run in a process of their own."""

from __future__ import annotations

from typing import Any

from hybridflow.core.contracts.rollout import RolloutEngine
from hybridflow.core.contracts.worker import RankContext
from hybridflow.core.values.model import ModelSpec
from hybridflow.kit.hosting.hosted import HostedEngine


class Hostable(RolloutEngine):
    """A base for an engine whose settings derive from ProcessConfig: hosted where they say so."""

    @classmethod
    def build(
        cls, model: ModelSpec, config: Any, context: RankContext, logs: str | None = None
    ) -> RolloutEngine:
        return (
            HostedEngine(cls, model, config, context, logs)
            if config.own_process
            else cls(model, config, context)
        )
