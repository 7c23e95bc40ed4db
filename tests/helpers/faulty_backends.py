"""The parts of TrainingBackendConformance tried on FSDP, broken on purpose."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from helpers.expect import caught
from hybridflow.backends.fsdp.backend import FSDPBackend
from hybridflow.backends.fsdp.config import FSDPConfig
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
