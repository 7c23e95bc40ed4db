"""Megatron's GPTModel for a role: norms and attention by the formulas, heads by kind, and what it does not build."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("megatron.core")

from transformers import AutoConfig

from hybridflow.backends.megatron.config import MegatronConfig
from hybridflow.backends.megatron.cpu import on_cpu
from hybridflow.backends.megatron.groups import group_collection
from hybridflow.backends.megatron.modules import (
    Attention,
    Norm,
    build_chunks,
    rotary,
    transformer_config,
)
from hybridflow.core.errors import ModelError
from hybridflow.core.values.parallel import ParallelLayout
from hybridflow.kit.huggingface.attention import PackedRows
from hybridflow.kit.testing import tiny_config

CPU = torch.device("cpu")
GENERATOR = torch.Generator().manual_seed(3)


def hf(architecture: str = "qwen2", **fields):
    """Four heads of 8 that share two keys and values, two layers."""
    given = tiny_config(architecture) | fields
    return AutoConfig.for_model(given.pop("model_type"), **given)


def settings(config=None, layout=None, model=None):
    return transformer_config(
        model or hf(), config or MegatronConfig(), layout or ParallelLayout(), CPU
    )


def test_the_sizes_are_those_of_the_model_and_of_the_layout():
    made = settings(
        MegatronConfig(precision="bf16", sequence_parallel=True), ParallelLayout(tp=2, pp=2)
    )
    assert (made.num_layers, made.hidden_size, made.ffn_hidden_size, made.num_query_groups) == (
        2,
        32,
        48,
        2,
    )
    assert (made.tensor_model_parallel_size, made.pipeline_model_parallel_size) == (2, 2)
    assert made.params_dtype == torch.bfloat16 and made.sequence_parallel and made.add_qkv_bias
    assert not settings(model=hf("llama")).add_qkv_bias and not settings().sequence_parallel


STANDARD = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


@pytest.mark.parametrize(
    ("model", "config", "layout", "said"),
    [
        (AutoConfig.for_model("gpt2"), {}, {}, "builds qwen2, qwen3, llama, mistral; got 'gpt2'"),
        (hf(hidden_act="gelu"), {}, {}, "knows the activation silu, got 'gelu'"),
        (hf(), {}, {"tp": 4}, "num_key_value_heads 2"),
        (hf(), {"virtual_stages": 2}, {"pp": 2}, "pp 2 x virtual_stages 2"),
        (hf(model_type="llama", mlp_bias=True), {}, {}, "no biases of the MLP"),
        (hf(model_type="llama", attention_bias=True), {}, {}, "no biases of the MLP"),
        (
            hf(use_sliding_window=True, sliding_window=8, max_window_layers=0),
            {},
            {},
            "no sliding windows",
        ),
        (hf(rope_parameters=STANDARD | {"rope_type": "yarn"}), {}, {}, "of type"),
        (hf(rope_parameters=STANDARD | {"high_freq_factor": 2.0}), {}, {}, "of type"),
    ],
)
def test_what_it_cannot_build_is_said(model, config, layout, said):
    with pytest.raises(ModelError, match=said):
        settings(MegatronConfig(**config), ParallelLayout(**layout), model)


def test_rotary_embeddings_have_the_base_and_llama_3s_scaling():
    plain = {"position_embedding_type": "rope", "rotary_base": 1e4}
    assert rotary(SimpleNamespace()) == plain
    assert rotary(SimpleNamespace(rope_parameters={"rope_theta": 1e6}))["rotary_base"] == 1e6
    scaled = rotary(SimpleNamespace(rope_parameters=STANDARD))
    assert scaled == plain | {"rotary_base": 5e5, "rope_scaling": True, "rope_scaling_factor": 8.0}


def test_a_norm_divides_by_the_root_of_the_mean_square():
    norm = Norm(settings(), 4, eps=0.5)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    # mean square 2.5, and 0.5
    want = torch.tensor([1.0, 4.0, 3.0, 8.0]) / math.sqrt(3.0)
    torch.testing.assert_close(norm(torch.tensor([1.0, 2.0, 1.0, 2.0])), want)
    assert norm.weight.sequence_parallel is False


def attend(q, k, v):
    """One head over one row, a token at a time. [T, D] each."""
    out = []
    for at in range(len(q)):
        weights = (k[: at + 1] @ q[at] / math.sqrt(q.shape[1])).softmax(0)
        out.append(weights @ v[: at + 1])
    return torch.stack(out)


def test_attention_is_causal_within_each_row_and_query_heads_share_keys():
    q = torch.randn(7, 1, 4, 8, generator=GENERATOR)
    k, v = torch.randn(2, 7, 1, 2, 8, generator=GENERATOR)
    packed = SimpleNamespace(rows=PackedRows([3, 4], CPU))
    found = Attention(settings(), 1)(q, k, v, packed_seq_params=packed)
    assert found.shape == (7, 1, 32)
    found, q, k, v = (tensor[:, 0] for tensor in (found, q, k, v))
    for part in (slice(0, 3), slice(3, 7)):
        alone = [attend(q[part, head], k[part, head // 2], v[part, head // 2]) for head in range(4)]
        torch.testing.assert_close(found[part], torch.cat(alone, -1))


@pytest.mark.parametrize(
    ("architecture", "kind", "head"),
    [
        ("qwen2", "policy", set()),
        ("llama", "policy", {"output_layer.weight"}),
        ("qwen2", "value", {"score.weight"}),
    ],
)
def test_a_model_has_the_head_of_its_kind(alone, architecture, kind, head):
    model = hf(architecture)
    with on_cpu(CPU):
        [chunk] = build_chunks(
            model, settings(model=model), kind, ParallelLayout(), group_collection(alone), 128
        )
    found = dict(chunk.named_parameters())
    assert {name for name in found if "decoder" not in name} == {
        "embedding.word_embeddings.weight",
        *head,
    }
    assert found["embedding.word_embeddings.weight"].shape == (128, 32)
    assert found["decoder.layers.1.self_attention.linear_qkv.weight"].shape == (
        64,
        32,
    )  # 32 + 16 + 16 rows
    assert ("decoder.layers.0.self_attention.linear_qkv.bias" in found) is (architecture == "qwen2")
    split = {name for name, p in found.items() if getattr(p, "tensor_model_parallel", False)}
    assert {name for name in split if "norm" in name or "score" in name} == set()
    assert "decoder.layers.0.mlp.linear_fc2.weight" in split
    assert found["decoder.layers.0.mlp.linear_fc2.weight"].partition_dim == 1
