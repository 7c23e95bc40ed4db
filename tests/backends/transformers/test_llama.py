"""Llama-like weights in the decoder's form: which models fit, and where each element lies."""

from __future__ import annotations

import pytest
import torch
from helpers.tensor_parallel_jobs import generation_of
from transformers import AutoConfig

from hybridflow.backends.transformers.llama import LlamaShape, LlamaWeights, unfit
from hybridflow.backends.transformers.parallel import Split
from hybridflow.core.errors import ModelError
from hybridflow.core.values.weights import Box
from hybridflow.kit.huggingface.models import saved_parameters
from hybridflow.kit.huggingface.shapes import shape_of

CPU = torch.device("cpu")
SMALL = dict(
    vocab_size=10,
    hidden_size=8,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    intermediate_size=6,
    tie_word_embeddings=False,
)
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}


def small(model_type="llama", **fields):
    return AutoConfig.for_model(model_type, **(SMALL | fields))


def weights_of(config, split=None):
    return LlamaWeights(config, saved_parameters(config)[0], torch.float32, CPU, split or Split())


@pytest.mark.parametrize(
    ("model_type", "fields", "reason"),
    [
        ("llama", {}, None),
        ("qwen3", {"rope_parameters": LINEAR}, None),
        ("mistral", {"sliding_window": None}, None),
        ("mistral", {"sliding_window": 8}, "it uses sliding-window attention"),
        ("gemma", {}, "model_type is 'gemma'"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("llama", {"mlp_bias": True}, "the MLP has biases"),
        ("llama", {"rope_parameters": DYNAMIC}, "its rotary embedding is 'dynamic'"),
        ("llama", {"rope_parameters": PARTIAL}, "its rotary embedding covers a part of each head"),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0},
            "some layers use sliding-window attention",
        ),
    ],
)
def test_a_model_that_does_not_fit_is_told_why(model_type, fields, reason):
    assert unfit(small(model_type, **fields)) == reason


def test_a_rank_computes_its_share_of_heads_and_units_and_at_least_one_key_head():
    shape = LlamaShape.of(small())
    assert shape == LlamaShape(1, 8, 6, 4, 2, 4, 10, 1e-6)
    assert shape.group == 2
    assert shape.part(2) == LlamaShape(1, 8, 3, 2, 1, 4, 10, 1e-6)
    four = LlamaShape.of(small(intermediate_size=12)).part(4)
    assert (four.heads, four.kv_heads, four.intermediate, four.vocab) == (1, 1, 3, 10)


def test_each_key_head_has_its_queries_beside_it_and_rotated_pairs_side_by_side():
    """Rows are numbered; of a head of 4 the elements (0, 2) and (1, 3) are rotated together."""
    weights = weights_of(small())
    for name, first in (("q_proj", 0), ("k_proj", 100), ("v_proj", 200)):
        place = weights.places[f"model.layers.0.self_attn.{name}.weight"]
        rows = torch.arange(place.shape[0]) + first
        place.write(Box.full(place.shape), rows[:, None].expand(place.shape))
    fused = weights.layers[0].qkv[0].tolist()  # [H, 2 * (2 + 2) * 4]: each row is the same
    queries, keys, values = [0, 2, 1, 3], [100, 102, 101, 103], [200, 201, 202, 203]
    first = queries + [4 + i for i in queries] + keys + values
    second = [8 + i for i in first[:8]] + [4 + i for i in keys + values]
    assert fused == first + second


def test_gate_and_up_share_a_matrix_and_the_rest_have_their_own():
    weights = weights_of(small())
    for name, value in (("gate_proj", 1.0), ("up_proj", 2.0), ("down_proj", 3.0)):
        place = weights.places[f"model.layers.0.mlp.{name}.weight"]
        place.write(Box.full(place.shape), torch.full(place.shape, value))
    layer = weights.layers[0]
    assert layer.gate_up.shape == (8, 12)
    assert layer.gate_up[0].tolist() == [1.0] * 6 + [2.0] * 6
    assert layer.down.shape == (6, 8)
    assert (layer.down == 3.0).all()
    assert layer.qkv_bias is None
    assert layer.q_norm is None


def test_a_tied_head_is_the_embedding_and_its_part_of_an_odd_vocabulary():
    config = small("qwen2", tie_word_embeddings=True, vocab_size=53)
    split = Split(2, 1, 2, None, shape_of(config.to_dict()), generation_of(2))
    weights = weights_of(config, split)
    assert weights.head.data_ptr() == weights.embed.data_ptr()
    assert weights.embed.shape == (27, 8)
    assert weights.places["model.embed_tokens.weight"].held == Box((27, 0), (53, 8))
    assert "lm_head.weight" not in weights.places


def test_a_parameter_that_no_layer_has_is_named():
    config = small()
    shapes = saved_parameters(config)[0] | {"model.extra.weight": (3,)}
    with pytest.raises(ModelError, match=r"the parameters model\.extra\.weight; set fast = false"):
        LlamaWeights(config, shapes, torch.float32, CPU)
