"""Weights from a training backend to a rollout engine of the same ranks."""

from __future__ import annotations

from hybridflow.core.errors import HybridFlowError
from hybridflow.core.rollout import RolloutEngine
from hybridflow.core.training import TrainingBackend
from hybridflow.core.weights import Box

ALL = "tp-cp-pp-dp"


def transfer_weights(backend: TrainingBackend, engine: RolloutEngine, version: int) -> None:
    """Whole parameters, one at a time, to an engine that holds all of them (tensor parallelism of one).

    Every rank takes part to the end, one whose engine fails too, and all of them raise if one has failed: so every
    engine refuses to generate until the next transfer has ended, which again all ranks begin.
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
    failed = backend.context.max([float(failure is not None)], ALL)[0]
    if failure is not None:
        raise failure
    if failed:
        raise HybridFlowError(f"the transfer of weights of version {version} failed on another rank; sync again")
    engine.end_update()
