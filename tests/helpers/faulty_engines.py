"""Our rollout engine broken on purpose, and the parts of RolloutEngineConformance tried on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import attrs

from helpers.expect import caught
from hybridflow.backends.transformers.config import TransformersEngineConfig
from hybridflow.backends.transformers.engine import TransformersEngine
from hybridflow.core.contracts.rollout import RolloutEngine
from hybridflow.kit.testing import one_rank


class Broken(TransformersEngine):
    """Our engine; what is asked and answered passes through `asked` and `answered`."""

    def asked(self, request):
        return request

    def answered(self, completion, request):
        return completion

    def submit(self, requests):
        by_id = {r.id: r for r in requests}
        stream = super().submit([self.asked(r) for r in requests])
        return (self.answered(c, by_id[c.id]) for c in stream)


class NoTemperature(Broken):
    def asked(self, request):
        temperature = 1.0 if request.sampling.temperature else 0.0
        return with_sampling(request, temperature=temperature)


def with_sampling(request, **changed):
    """The request with other fields of its SamplingParams."""
    return attrs.evolve(request, sampling=attrs.evolve(request.sampling, **changed))


@contextmanager
def starter(engine: type[RolloutEngine] = TransformersEngine) -> Iterator[Any]:
    """A function ModelSpec -> a started engine of this class, without weights."""
    with one_rank() as context:

        def start(spec):
            started = engine(spec, TransformersEngineConfig(), context)
            started.start()
            return started

        yield start


def caught_in_engine(part: type, engine: type[RolloutEngine], method: str) -> None:
    """The method of a part of RolloutEngineConformance notices what is wrong with the engine."""

    class Kit(part):
        architectures = ("llama",)

    with starter(engine) as start:
        caught(Kit, method, start=start)
