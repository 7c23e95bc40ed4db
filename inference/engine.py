"""One engine in this process, with a model's weights: no workers, no trainer, no runtime."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hybridflow.core.contracts.rollout import RolloutEngine
from hybridflow.core.contracts.training import TrainingBackend
from hybridflow.core.contracts.worker import RankContext
from hybridflow.core.job.job import Job
from hybridflow.core.plugins import registry
from hybridflow.core.resharding.plan import plan_reshard
from hybridflow.core.rollouts.build import build_engine, start_engine
from hybridflow.core.rollouts.same_ranks import HybridEngine
from hybridflow.core.rollouts.weight_sync import on_every_rank
from hybridflow.core.values.parallel import ParallelLayout, generation_layout


def one_device(job: Job) -> RankContext:
    """Return the context of a single rank on the job's device."""
    layout = ParallelLayout()
    device = torch.device(job.device)
    generation = generation_layout(layout)
    return RankContext("actor", 0, layout, device, job.run.seed, generation)


def saved_model(job: Job, context: RankContext) -> TrainingBackend:
    """Return the backend that reads the weights of the job's actor."""
    role = job.models["actor"].spec
    backend_class: type[TrainingBackend] = registry().get("training_backend", role.backend)
    backend = backend_class(role.model, role.backend_config, None, context)
    backend.build()
    return backend


@contextmanager
def started(job: Job) -> Iterator[RolloutEngine]:
    """Yield the job's engine with the weights of its actor, and close it at the end."""
    role = job.models["actor"].spec
    context = one_device(job)
    backend = saved_model(job, context)
    assert role.engine is not None
    logs = str((job.folder / "logs").absolute())
    engine = build_engine(role.engine, role.model, role.engine_config, context, logs)
    try:
        start_engine(engine)
        target = on_every_rank(engine.layout(), context)
        plan = plan_reshard(backend.layout(), target, role.sync.bucket_bytes)
        HybridEngine(backend, engine, context, plan, role.transport, share=False).sync()
        yield engine
    finally:
        engine.close()
