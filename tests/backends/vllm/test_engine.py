"""vLLM against the kit, alone and with tensor parallelism; run by `make test-engines`."""

from __future__ import annotations

import pytest
import torch
from helpers import engine_jobs as jobs
from helpers.installed import needs
from helpers.kept_engines import KeptOnCPU, kept_engines

from hybridflow.backends.vllm.config import VLLMConfig
from hybridflow.backends.vllm.engine import VLLMEngine
from hybridflow.core.contracts.worker import RankContext
from hybridflow.core.errors import ModelError
from hybridflow.core.values.model import ModelSpec
from hybridflow.core.values.parallel import ParallelLayout
from hybridflow.kit.testing import tiny_config

SMALL = VLLMConfig(kv_memory_gb=0.05, max_sequences=64)
ALONE = RankContext("actor", 0, ParallelLayout(), torch.device("cpu"))


@pytest.fixture(scope="module")
def started():
    with kept_engines(lambda spec, context: VLLMEngine(spec, SMALL, context)) as start:
        yield start


@needs("vllm")
class TestVLLM(KeptOnCPU):
    pass


@needs("vllm")
class TestVLLMWithExperts(KeptOnCPU):
    architectures = ("qwen3_moe",)


@needs("vllm")
@pytest.mark.parametrize("architecture", ["qwen2", "llama"])
def test_two_ranks_speak_as_hugging_face_after_every_update(ranks, architecture):
    found = jobs.two_ranks(ranks, jobs.vllm, architecture)
    assert [answer["left"] for answer in found] == [[], []]


@pytest.mark.parametrize("kind", ["value", "score"])
def test_a_model_that_is_no_policy_is_refused_before_vllm_is_imported(kind):
    engine = VLLMEngine(ModelSpec(tiny_config(), None, 0, kind), SMALL, ALONE)
    with pytest.raises(
        ModelError, match=f"generates with a policy; this model is a '{kind}' model"
    ):
        engine.start()
    engine.close()  # there is nothing to end
