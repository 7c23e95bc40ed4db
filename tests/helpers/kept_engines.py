"""Engines that take seconds to start: one per model serves all tests, and each test gets it as if it were new."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from hybridflow.core.contracts.worker import RankContext
from hybridflow.core.values.model import ModelSpec
from hybridflow.kit.testing import RolloutEngineConformance, one_rank


@contextmanager
def kept_engines(
    make: Callable[[ModelSpec, RankContext], Any],
) -> Iterator[Callable[[ModelSpec], Any]]:
    """`start(spec)` gives what `make(spec, context)` has made for that model, started, awake and without weights."""
    engines: dict[str, Any] = {}
    with one_rank() as context:

        def start(spec: ModelSpec) -> Any:
            key = repr((spec.hf_config, spec.kind))
            if key not in engines:
                engines[key] = make(spec, context)
                engines[key].start()
            engine = engines[key]
            engine.abort()
            engine._end_old_stream()
            if engine.asleep:
                engine.wake()
            engine.version = None
            return engine

        try:
            yield start
        finally:
            for engine in engines.values():
                engine.close()


class KeptOnCPU(RolloutEngineConformance):
    """Of an engine that is a package of its own; fixture `started` is what kept_engines gives."""

    sleeps = False  # a CPU has no second memory
    tolerance, width = 1e-4, 128

    @pytest.fixture
    def start(self, started):
        return started
