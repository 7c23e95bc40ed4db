"""Shapes of models from their configs, against transformers and the published numbers."""

from __future__ import annotations

import pytest
import torch

from hybridflow.core.errors import ConfigError
from hybridflow.kit.huggingface.shapes import PUBLISHED, is_small, read_shape, shape_of


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mixtral", "qwen2_moe"])
def test_shapes_are_those_of_transformers(name):
    transformers = pytest.importorskip("transformers")
    extra = {"mixtral": {"num_local_experts": 4}, "qwen3": {"head_dim": 8},
             "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 24}}  # fmt: skip
    fields = dict(
        model_type=name, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, vocab_size=53, tie_word_embeddings=name == "qwen2",
    ) | extra.get(name, {})  # fmt: skip
    config = transformers.AutoConfig.for_model(**fields)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    theirs = {n: tuple(p.shape) for n, p in model.named_parameters()}
    ours = {n: p.shape for n, p in shape_of(config.to_dict()).params().items()}
    if name in (
        "mixtral",
        "qwen2_moe",
    ):  # transformers 5 stacks experts in memory; it saves them one by one
        theirs = {n: s for n, s in theirs.items() if "experts." not in n or "shared" in n}
        ours = {n: s for n, s in ours.items() if ".experts." not in n}
        ours = {n.replace("block_sparse_moe.gate", "mlp.gate"): s for n, s in ours.items()}
    assert ours == theirs


def test_built_in_shapes_have_the_published_numbers_of_parameters():
    billions = {n: sum(p.numel for p in s.params().values()) / 1e9 for n, s in PUBLISHED.items()}
    published = {"llama-7b": 6.74, "llama-13b": 13.02, "llama-70b": 68.98, "llama-3-8b": 8.03, "qwen2.5-0.5b": 0.494,
                 "qwen2.5-1.5b": 1.54, "qwen2.5-7b": 7.62}  # fmt: skip
    for name, value in published.items():
        assert billions[name] == pytest.approx(value, rel=0.005)


def test_reading_a_shape_that_is_not_there_says_what_there_is(tmp_path):
    with pytest.raises(ConfigError, match="llama-70b"):
        read_shape(tmp_path / "none")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ConfigError, match="gpt2"):
        read_shape(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 4}')
    with pytest.raises(ConfigError, match="lacks num_hidden_layers"):
        read_shape(tmp_path)


def test_a_model_is_small_where_it_is_known_to_be():
    half = {
        "model_type": "qwen2", "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14,
        "num_key_value_heads": 2, "intermediate_size": 4864, "vocab_size": 151936, "tie_word_embeddings": True,
    }  # fmt: skip
    assert is_small(half)  # 494 million
    assert not is_small({**half, "num_hidden_layers": 25})  # 509 million
    assert not is_small({"model_type": "unheard-of"})
