"""What vLLM's loader says without an engine: against boxes by hand, a started engine, and the formula."""

from __future__ import annotations

import attrs
import pytest
import torch
from helpers.installed import needs
from helpers.paths import matrix
from helpers.vllm_boxes import HIDDEN, SMALL, held_by_hand, layout_of

from hybridflow.core.errors import ModelError
from hybridflow.core.values.parallel import ParallelLayout, generation_layout
from hybridflow.kit.huggingface.shapes import shape_of
from hybridflow.kit.testing.models import reference

SIZES = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 192,
    "max_position_embeddings": 128,
    "vocab_size": 97,
}
REPLICAS = generation_layout(ParallelLayout(dp=4), tp=2, grouping="consecutive")
"""Two replicas of two ranks: (0, 1) and (2, 3)."""


@needs("vllm")
@pytest.mark.parametrize("architecture", [pytest.param("qwen2", marks=matrix), "qwen3_moe"])
def test_it_says_what_is_known_by_hand(architecture):
    ref = reference(architecture, width=HIDDEN)
    traced = SMALL.traced(ref.spec.hf_config, 2, torch.float32)
    assert not traced.opaque
    assert traced.shapes == {name: tuple(values.shape) for name, values in ref.parameters.items()}
    layout = traced.layout(REPLICAS, torch.float32)
    for rank in range(4):
        for name, shape in traced.shapes.items():
            box = held_by_hand(name, shape, rank % 2)
            assert layout.held[rank][name] == (() if box is None else (box,)), (rank, name)


@needs("vllm")
def test_it_says_what_a_started_engine_says(ranks):
    ranks.renew(2)
    spec = attrs.evolve(reference("qwen3_moe", width=HIDDEN).spec, path=None)
    shapes, held, ties, opaque = ranks(layout_of, 2, spec)[0]
    traced = SMALL.traced(spec.hf_config, 2, torch.float32)
    assert (dict(traced.shapes), dict(traced.ties), dict(traced.opaque)) == (shapes, ties, opaque)
    assert [dict(boxes) for boxes in traced.boxes] == [held[0], held[1]]


@needs("vllm")
@pytest.mark.parametrize(
    "kind", [pytest.param("llama", marks=matrix), "qwen2", pytest.param("qwen3", marks=matrix)]
)
@matrix
def test_the_formula_has_the_bytes_of_the_loader(kind):
    # 97 embeddings are padded: 64 rows on the first rank, 33 on the second.
    fields = {**SIZES, "model_type": kind, "head_dim": 32, "tie_word_embeddings": False}
    asked = SMALL.traced(fields, 2, torch.bfloat16).layout(REPLICAS, torch.bfloat16)
    formula = SMALL.planned_layout(shape_of(fields), REPLICAS, torch.bfloat16)
    assert [asked.nbytes(rank) for rank in range(4)] == [formula.nbytes(rank) for rank in range(4)]
    assert asked.held[2]["lm_head.weight"][0].stop == (64, 128)
    assert asked.held[3]["lm_head.weight"][0].start == (64, 0)


@needs("vllm")
@matrix
def test_a_model_that_vllm_does_not_take_is_refused_with_its_parameter():
    fields = {"model_type": "ctrl", "vocab_size": 97, "n_embd": 32, "n_layer": 1, "n_head": 4, "dff": 64}  # fmt: skip
    with pytest.raises(ModelError, match=r"vLLM takes no .* of this ctrl"):
        SMALL.traced(fields, 1, torch.float32)
