"""vLLM against the kit; run by `make test-engines`."""

import pytest

pytest.importorskip("vllm")

from hybridflow.backends.vllm.config import VLLMConfig
from hybridflow.backends.vllm.engine import VLLMEngine
from hybridflow.kit.testing import RolloutEngineConformance, one_rank


@pytest.fixture(scope="module")
def context():
    with one_rank() as context:
        yield context


@pytest.fixture(scope="module")
def started(context):
    """An engine takes seconds to start, so one per model serves all tests; each gets it as if it were new."""
    engines: dict[str, VLLMEngine] = {}

    def start(spec):
        key = repr((spec.hf_config, spec.kind))
        if key not in engines:
            engines[key] = VLLMEngine(spec, VLLMConfig(kv_memory_gb=0.05, max_sequences=64), context)
            engines[key].start()
        engine = engines[key]
        engine._end_old_stream()
        engine.version, engine.store.complete = None, False
        return engine

    yield start
    for engine in engines.values():
        engine.close()


class TestVLLM(RolloutEngineConformance):
    sleeps = False  # a CPU has no second memory
    tolerance, width = 1e-4, 128

    @pytest.fixture
    def start(self, started):
        return started
