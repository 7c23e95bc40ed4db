"""Weights from a training backend to a rollout engine of the same ranks."""

from __future__ import annotations

from hybridflow.core.rollout import RolloutEngine
from hybridflow.core.training import TrainingBackend
from hybridflow.core.weights import Box


def transfer_weights(backend: TrainingBackend, engine: RolloutEngine, version: int) -> None:
    """Whole parameters, one at a time, to an engine that holds all of them (tensor parallelism of one).

    Every rank takes part, to the end: one whose engine fails goes on with the others' collectives and raises then. Its
    engine refuses to generate until the next transfer has ended.
    """
    wanted = engine.layout()
    engine.begin_update(version)
    failure: Exception | None = None
    for name, tensor in backend.full_parameters():
        if failure is None and name in wanted.params:
            try:
                engine.receive(name, Box.full(tensor.shape), tensor.detach())
            except Exception as error:
                failure = error
    if failure is not None:
        raise failure
    engine.end_update()
