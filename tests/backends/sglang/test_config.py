"""The settings of SGLang: arguments are checked by name without importing it; what it takes of a device."""

from __future__ import annotations

import pytest
from helpers.engine_settings import EngineSettings

from hybridflow.backends.sglang import config
from hybridflow.backends.sglang.config import SGLangConfig
from hybridflow.core.contracts.footprint import EngineRoom

PART = """
class Prefill:
    chunked_prefill_size: int = 0
"""
WHOLE = """
class Other:
    unrelated: int = 0
class ServerArgs:
    model_path: str
"""


class TestSettings(EngineSettings):
    module, config, package, engine = config, SGLangConfig, "sglang", "sglang.srt"
    argument, ours = ("chunked_prefill_size", "chunked_prefil_size", 512), "tp_size"
    sources = {"sglang/srt/arg_groups/fields/prefill.py": PART, "sglang/srt/server_args.py": WHOLE}
    wrong = {"max_sequences": 0, "gpu_memory": 1.5, "kv_tokens": -1, "bucket_mb": 0, "restarts": -1}


def test_a_cache_of_so_many_tokens_leaves_no_share_of_the_device_open():
    given = SGLangConfig(kv_tokens=4096, max_length=96, max_sequences=7).limits()
    assert (given.cache_tokens, given.memory_share) == (4096, None)
    assert (given.max_length, given.max_sequences) == (96, 7)
    shared = SGLangConfig(gpu_memory=0.3).limits()
    assert (shared.cache_tokens, shared.memory_share, shared.max_length) == (None, 0.3, None)


def test_a_cache_that_outlives_an_update_is_refused():
    SGLangConfig(engine_args=dict(hicache_storage_backend=None))
    with pytest.raises(ValueError, match="hicache_storage_backend"):
        SGLangConfig(engine_args=dict(hicache_storage_backend="file"))


def test_a_room_leaves_a_cache_of_so_many_tokens_as_it_is():
    room = EngineRoom(device=80e9, share=24e9, cache=20e9)
    assert SGLangConfig(kv_tokens=4096).within(room) == SGLangConfig(kv_tokens=4096)


def test_on_a_cpu_its_cache_has_a_size_and_no_share():
    on_cpu = SGLangConfig().limits("cpu")
    assert on_cpu.memory_share is None
    assert (on_cpu.cache_gb, on_cpu.cache_tokens) == (None, 65536)
