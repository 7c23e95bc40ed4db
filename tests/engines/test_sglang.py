"""SGLang against the kit, in a process of its own as always; run by `make test-engines`."""

import pytest

pytest.importorskip("sglang")

from hybridflow.backends.sglang.config import SGLangConfig
from hybridflow.backends.sglang.engine import SGLangEngine
from hybridflow.kit.hosting.hosted import HostedEngine
from hybridflow.kit.testing import RolloutEngineConformance, one_rank

SMALL = SGLangConfig(kv_tokens=16384, max_sequences=64)


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """An engine takes half a minute to start, so one per model serves all tests; each gets it as if it were new."""
    engines: dict[str, HostedEngine] = {}
    logs = tmp_path_factory.mktemp("logs")
    with one_rank() as context:

        def start(spec):
            key = repr((spec.hf_config, spec.kind))
            if key not in engines:
                engines[key] = HostedEngine(SGLangEngine, spec, SMALL, context, str(logs))
                engines[key].start()
            engine = engines[key]
            engine._end_old_stream()
            engine.version, engine.store.complete = None, False
            return engine

        yield start
        for engine in engines.values():
            engine.close()


class TestSGLang(RolloutEngineConformance):
    recomputes = True
    sleeps = False  # a CPU has no second memory
    tolerance, width = 1e-4, 128

    @pytest.fixture
    def start(self, started):
        return started
