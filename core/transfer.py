"""Weights from a training backend to a rollout engine of the same ranks."""

from __future__ import annotations

from hybridflow.core.rollout import RolloutEngine
from hybridflow.core.training import TrainingBackend
from hybridflow.core.weights import Box


def transfer_weights(backend: TrainingBackend, engine: RolloutEngine, version: int) -> None:
    """Whole parameters, one at a time, to an engine that holds all of them (tensor parallelism of one).

    Every rank takes part. If it fails half way the engine refuses to generate until the next one ends.
    """
    wanted = engine.layout()
    engine.begin_update(version)
    for name, tensor in backend.full_parameters():
        if name in wanted.params:
            engine.receive(name, Box.full(tensor.shape), tensor.detach())
    engine.end_update()
