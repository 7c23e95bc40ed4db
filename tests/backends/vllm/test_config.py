"""The settings of vLLM: arguments are checked by name without importing it; what it takes of a device."""

from __future__ import annotations

import pytest
from helpers.engine_settings import EngineSettings

from hybridflow.backends.vllm import config
from hybridflow.backends.vllm.config import VLLMConfig
from hybridflow.core.contracts.footprint import EngineRoom

ARGUMENTS = """
class Other:
    unrelated: int = 0
class EngineArgs:
    block_size: int = 16
    enforce_eager: bool = False
"""


class TestSettings(EngineSettings):
    module, config, package, engine = config, VLLMConfig, "vllm", "vllm.engine"
    argument, ours = ("block_size", "block_sise", 32), "tensor_parallel_size"
    sources = {"vllm/engine/arg_utils.py": ARGUMENTS}
    wrong = {"max_sequences": 0, "gpu_memory": 1.5, "kv_memory_gb": -1}


def test_a_cache_of_a_given_size_leaves_no_share_of_the_device_open():
    given = VLLMConfig(kv_memory_gb=2.5, max_length=96, max_sequences=7).limits()
    assert (given.cache_gb, given.memory_share) == (2.5, None)
    assert (given.max_length, given.max_sequences) == (96, 7)
    shared = VLLMConfig(gpu_memory=0.3).limits()
    assert (shared.cache_gb, shared.memory_share, shared.max_length) == (None, 0.3, None)


def test_a_cache_that_outlives_an_update_is_refused():
    VLLMConfig(engine_args=dict(kv_transfer_config=None))
    with pytest.raises(ValueError, match="kv_transfer_config keeps keys and values of old weights"):
        VLLMConfig(engine_args=dict(kv_transfer_config={"kv_connector": "LMCacheConnectorV1"}))


def test_a_room_limits_a_cache_of_a_given_size():
    room = EngineRoom(device=80e9, share=24e9, cache=20e9)
    assert VLLMConfig(kv_memory_gb=40.0).within(room).kv_memory_gb == 20.0
    assert VLLMConfig(kv_memory_gb=10.0).within(room).kv_memory_gb == 10.0


def test_on_a_cpu_its_cache_has_a_size_and_no_share():
    on_cpu = VLLMConfig().limits("cpu")
    assert on_cpu.memory_share is None
    assert (on_cpu.cache_gb, on_cpu.cache_tokens) == (1.0, None)
