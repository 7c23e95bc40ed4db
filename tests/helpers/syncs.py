"""How weights are synced, as a job says it."""

from __future__ import annotations

from typing import Any

import attrs

from hybridflow.backends.transports.disk import DiskConfig
from hybridflow.core.job.job import Chosen
from hybridflow.core.job.sections import SyncConfig
from hybridflow.core.resharding.plan import plan_reshard
from hybridflow.core.rollouts.same_ranks import HybridEngine
from hybridflow.core.rollouts.weight_sync import on_every_rank


def sync(transport: str = "auto", folder: str | None = None, **settings: Any) -> dict[str, Any]:
    """The fields `sync` and `transport` of a ModelRole; `folder` is for the one that needs it. Buckets may be tiny."""
    with attrs.validators.disabled():
        config = SyncConfig(**settings)
    return {"sync": config, "transport": chosen(transport, folder)}


def chosen(transport: str = "auto", folder: str | None = None) -> Chosen:
    return Chosen(transport, transport_config(transport, folder))


def transport_config(transport: str, folder: str | None) -> DiskConfig | None:
    return DiskConfig(folder) if transport == "disk" and folder is not None else None


def hybrid_engine(worker: Any, **settings: Any) -> HybridEngine:
    """A HybridEngine of the backend and engine of a model worker, planned as the worker would."""
    target = on_every_rank(worker.engine.layout(), worker.context)
    plan = plan_reshard(worker.backend.layout(), target)
    return HybridEngine(worker.backend, worker.engine, worker.context, plan, chosen(), **settings)
