"""The parts of TrainingBackendConformance tried on FSDP, broken on purpose."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from helpers.expect import caught
from hybridflow.backends.fsdp.backend import FSDPBackend
from hybridflow.backends.fsdp.config import FSDPConfig
from hybridflow.core.values.metrics import Metrics
from hybridflow.kit.testing import one_rank


@contextmanager
def builder(backend: type[FSDPBackend] = FSDPBackend) -> Iterator[Any]:
    """A function (ModelSpec, OptimizerConfig or None) -> a built backend of this class."""
    with one_rank() as context:

        def build(spec, optimizer=None):
            built = backend(spec, FSDPConfig(), optimizer, context)
            built.build()
            return built

        yield build


def caught_in_backend(part: type, backend: type, method: str, **fixtures: Any) -> None:
    """The method of a part of TrainingBackendConformance notices what is wrong with the backend."""

    class Kit(part):
        architectures = ("qwen2",)
        kinds = ("policy",)

    with builder(backend) as build:
        caught(Kit, method, build=build, **fixtures)


class ForgetsTheOtherRanks(FSDPBackend):
    """Only the first rank's rows count: what a backend does that adds no gradients up, seen from there."""

    def forward_backward(self, micros, needs, loss, temperature=1.0):
        def own(at, outputs):
            return loss(at, outputs) * (self.context.rank == 0)

        super().forward_backward(micros, needs, own, temperature)


class NormsOfItsOwn(FSDPBackend):
    """The second rank says another norm, and has no moments after a load."""

    def optim_step(self):
        metrics = super().optim_step()
        return Metrics.of(grad_norm=metrics["grad_norm"] * (1 + self.context.rank))

    def load(self, folder):
        super().load(folder)
        if self.context.rank == 1:
            for values in self._optimizer_tensors():
                values.zero_()
