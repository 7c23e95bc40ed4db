"""vLLM against the kit, alone and with tensor parallelism; run by `make test-engines`."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import engine_jobs as jobs
from helpers.installed import needs
from helpers.kept_engines import KeptOnCPU, kept_engines

from hybridflow.backends.vllm.config import VLLMConfig
from hybridflow.backends.vllm.engine import VLLMEngine
from hybridflow.core.contracts.rollout import Request, SamplingParams
from hybridflow.core.contracts.worker import RankContext
from hybridflow.core.errors import HybridFlowError, ModelError
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


class Told:
    """Notes what is asked of vLLM's sleep: a CPU's does nothing."""

    def __init__(self):
        self.said: list = []

    def sleep(self, level):
        self.said.append(("sleep", level))

    def wake_up(self, tags):
        self.said.append(tags)


def test_on_a_gpu_weights_wake_before_caches():
    engine = VLLMEngine(ModelSpec(tiny_config(), None, 0), SMALL, ALONE)
    engine.device, engine.llm, engine.store = torch.device("cuda"), Told(), SimpleNamespace()
    engine.sleep()
    engine.sleep()
    engine.wake(cache=False)
    with pytest.raises(HybridFlowError, match="wake it before generating"):
        engine.add(Request(0, np.array([1]), SamplingParams(max_tokens=1)))
    engine.wake()
    engine.wake()
    assert engine.llm.said == [("sleep", 2), ["weights"], ["kv_cache"]]


@pytest.mark.parametrize("kind", ["value", "score"])
def test_a_model_that_is_no_policy_is_refused_before_vllm_is_imported(kind):
    engine = VLLMEngine(ModelSpec(tiny_config(), None, 0, kind), SMALL, ALONE)
    with pytest.raises(
        ModelError, match=f"generates with a policy; this model is a '{kind}' model"
    ):
        engine.start()
    engine.close()  # there is nothing to end


LATENT = {
    "model_type": "deepseek_v2", "vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 32, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 8, "first_k_dense_replace": 1, "max_position_embeddings": 64, "n_routed_experts": 2,
}  # fmt: skip


def test_positions_that_vllm_computes_wrongly_are_refused_before_it_is_imported():
    engine = VLLMEngine(ModelSpec(LATENT, None, 0), SMALL, ALONE)
    with pytest.raises(ModelError, match="other positions for a deepseek_v2 without rope scaling"):
        engine.start()
    engine.close()


@pytest.mark.parametrize(("latent", "backend"), [(True, "CPU_MLA"), (False, None)])
def test_float32_on_a_cpu_has_an_attention_of_its_own_for_latent_vectors(latent, backend):
    engine = VLLMEngine(ModelSpec(tiny_config(), None, 0), SMALL, ALONE)
    engine.max_positions, engine._latent = 32, latent
    assert engine._arguments("folder").get("attention_backend") == backend


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
