"""Settings of the embedded engine: what is refused, and what they take of a device."""

from __future__ import annotations

import pytest
import torch

from hybridflow.backends.transformers.config import MAX_BURST, TransformersEngineConfig
from hybridflow.core.contracts.footprint import EngineRoom
from hybridflow.core.values.parallel import ParallelLayout, generation_layout
from hybridflow.core.values.weights import Box
from hybridflow.kit.huggingface.shapes import llama_shape


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dtype", "float16"),
        ("max_sequences", -1),
        ("prefill_tokens", 0),
        ("kv_memory_gb", -1.0),
        ("sync_every", -1),
    ],
)
def test_a_setting_out_of_range_is_refused_by_its_name(name, value):
    with pytest.raises(ValueError, match=name):
        TransformersEngineConfig(**{name: value})


def test_its_limits_are_those_of_the_settings_and_256_sequences_where_none_is_set():
    automatic = TransformersEngineConfig().limits()
    assert automatic.weight_bytes == 4
    assert automatic.max_sequences == 256
    assert automatic.cache_gb is None
    given = TransformersEngineConfig(dtype="bfloat16", max_sequences=8, kv_memory_gb=0.5).limits()
    assert given.weight_bytes == 2
    assert given.max_sequences == 8
    assert given.cache_gb == 0.5


def test_a_row_may_run_over_its_end_only_where_nobody_looks_after_each_token():
    assert TransformersEngineConfig().limits("cpu").spare_tokens == 0
    assert TransformersEngineConfig(sync_every=3).limits("cpu").spare_tokens == MAX_BURST
    assert TransformersEngineConfig().limits("cuda").spare_tokens == MAX_BURST


def test_a_room_limits_the_cache_and_leaves_a_smaller_one():
    room = EngineRoom(device=80e9, share=30e9, cache=20e9)
    assert TransformersEngineConfig().within(room).kv_memory_gb == 20.0
    assert TransformersEngineConfig(kv_memory_gb=8.0).within(room).kv_memory_gb == 8.0
    assert TransformersEngineConfig(kv_memory_gb=40.0).within(room).kv_memory_gb == 20.0


def test_a_trainer_may_use_the_storage_of_all_that_is_neither_fused_nor_transposed():
    """Hidden 32, 4 heads and 2 key heads of 8, MLP of 48, 10 tokens, one layer."""
    shape = llama_shape(32, 1, 4, 2, 8, 48, 10)
    tables = 10 * 32 + 10 * 32 + 32  # embedding, head, last norm
    norms = 2 * 32
    matrices = 32 * 32 + 3 * 32 * 48  # of attention's output, gate, up, down
    narrow = TransformersEngineConfig(dtype="bfloat16")
    assert TransformersEngineConfig().lent_params(shape, "cpu") == tables + norms
    assert TransformersEngineConfig().lent_params(shape, "cuda") == tables + norms + matrices
    assert narrow.lent_params(shape, "cpu") == tables + norms + matrices


def test_the_planned_layout_cuts_heads_and_vocabulary_over_the_ranks_of_a_replica():
    """Four ranks as two replicas of two; a hidden size of 32, 4 heads of 8 and 2 key heads."""
    shape = llama_shape(32, 1, 4, 2, 8, 48, 10)
    generation = generation_layout(ParallelLayout(dp=4), tp=2)
    planned = TransformersEngineConfig().planned_layout(shape, generation, torch.bfloat16)
    assert {param.dtype for param in planned.params.values()} == {torch.bfloat16}
    (ranks,) = {tuple(replica[0]) for replica in generation.replicas if 0 in replica[0]}
    second = ranks[1]
    attention = "model.layers.0.self_attn."
    assert planned.held[second]["model.embed_tokens.weight"] == (Box((5, 0), (10, 32)),)
    assert planned.held[second][f"{attention}q_proj.weight"] == (Box((16, 0), (32, 32)),)
    assert planned.held[second][f"{attention}k_proj.weight"] == (Box((8, 0), (16, 32)),)
    assert planned.held[second][f"{attention}o_proj.weight"] == (Box((0, 16), (32, 32)),)
    assert planned.held[second]["model.norm.weight"] == (Box((0,), (32,)),)
