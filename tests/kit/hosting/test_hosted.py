"""An engine in a process of its own: the kit, crashes, and what is left behind."""

from __future__ import annotations

import pytest

from hybridflow.backends.transformers.config import TransformersEngineConfig
from hybridflow.backends.transformers.engine import TransformersEngine
from hybridflow.kit.hosting.hosted import HostedEngine
from hybridflow.kit.testing import RolloutEngineConformance, one_rank


@pytest.fixture(scope="module")
def hosted(tmp_path_factory):
    """One process per model serves all tests; each gets its engine as if it were new."""
    engines: dict[str, HostedEngine] = {}
    logs = tmp_path_factory.mktemp("logs")
    with one_rank() as context:

        def start(spec):
            key = repr((spec.hf_config, spec.kind))
            if key not in engines:
                engines[key] = HostedEngine(TransformersEngine, spec, TransformersEngineConfig(), context, str(logs))
                engines[key].start()
            engine = engines[key]
            engine.abort()
            engine._end_old_stream()
            if engine.asleep:
                engine.wake()
            engine.version, engine.store.complete = None, False
            return engine

        yield start
        for engine in engines.values():
            engine.close()


class TestHosted(RolloutEngineConformance):
    @pytest.fixture
    def start(self, hosted):
        return hosted
