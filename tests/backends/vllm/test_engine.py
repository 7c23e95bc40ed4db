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
from hybridflow.core.values.parallel import ParallelLayout, generation_layout
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


@pytest.mark.parametrize(
    ("device", "seen", "tp", "off"),
    [("cuda", 1, 2, True), ("cuda", 1, 1, False), ("cuda", 2, 2, False), ("cpu", 0, 2, False)],
)
def test_vllms_own_all_reduce_is_off_where_a_rank_sees_its_device_alone(
    monkeypatch, device, seen, tp, off
):
    # vLLM asks its table of device pairs for "0->1", which has no such pair where one device is seen.
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    layout = ParallelLayout(dp=2)
    context = RankContext(
        "actor", 0, layout, torch.device(device), generation=generation_layout(layout, tp=tp)
    )
    engine = VLLMEngine(ModelSpec(tiny_config(), None, 0), SMALL, context)
    engine.max_positions = 32
    assert engine._arguments("folder").get("disable_custom_all_reduce", False) is off
