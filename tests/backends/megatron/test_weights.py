"""Where canonical parameters are in Megatron's fused storage, for every rank; without Megatron."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers.random_layouts import LLAMA, QWEN, QWEN3

from hybridflow.backends.megatron.weights import RoleShape
from hybridflow.core.values.parallel import ParallelLayout

LAYER = (
    "input_layernorm.weight", "self_attention.linear_qkv.weight", "self_attention.linear_proj.weight",
    "pre_mlp_layernorm.weight", "mlp.linear_fc1.weight", "mlp.linear_fc2.weight",
)  # fmt: skip


def names(shape: RoleShape, pp: int) -> list[tuple[str, int | None]]:
    """Megatron's parameters of a stage."""
    stages, virtual = shape.layout.pp, shape.virtual_stages
    each = shape.shape.layers // (stages * virtual)
    layers = [v * stages * each + pp * each + i for v in range(virtual) for i in range(each)]
    extra = []
    if "self_attn.q_proj.bias" in shape.shape.layer:
        extra.append("self_attention.linear_qkv.bias")
    if "self_attn.q_norm.weight" in shape.shape.layer:
        extra += ["self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight"]
    found: list[tuple[str, int | None]] = [(n, layer) for layer in layers for n in (*LAYER, *extra)]
    if pp == 0:
        found.append(("embedding.word_embeddings.weight", None))
    if pp == stages - 1:
        found.append(("decoder.final_layernorm.weight", None))
        if shape.kind != "policy":
            found.append(("score.weight", None))
        elif not shape.ties or stages > 1:
            found.append(("output_layer.weight", None))
    return found


@pytest.mark.parametrize("model", [QWEN, LLAMA, QWEN3], ids=["qwen2-tied", "llama", "qwen3"])
@pytest.mark.parametrize("kind", ["policy", "value"])
@pytest.mark.parametrize(
    ("layout", "virtual"),
    [
        (ParallelLayout(), 1), (ParallelLayout(tp=2), 1), (ParallelLayout(pp=2), 2), (ParallelLayout(tp=2, pp=2, dp=2), 1),
        (ParallelLayout(tp=2, pp=2, dp=2, order="tp-cp-dp-pp"), 1), (ParallelLayout(pp=4), 1),
    ],
    ids=str,
)  # fmt: skip
def test_what_the_storage_holds_is_what_the_layout_says(model, kind, layout, virtual):
    for multiple in (1, 16, 128):
        shape = RoleShape(model, kind, layout, virtual, multiple)
        said = shape.layout_of(torch.float32)
        for rank in range(layout.world):
            at, held = layout.coords(rank), {}
            for name, layer in names(shape, at.pp):
                for canonical, whole, box, _ in shape.pieces(name, layer, at.tp):
                    assert whole == said.params[canonical].shape
                    if box.numel:
                        held.setdefault(canonical, set()).add(box)
            assert held == {n: set(boxes) for n, boxes in said.held[rank].items() if boxes}


def test_fused_projections_are_interleaved_by_key_value_group():
    """q0 k0 v0 q1 k1 v1, each contiguous; a group has four query heads of four rows."""
    shape = RoleShape(LLAMA, "policy", ParallelLayout(), 1, 1)
    found = [
        (n.split(".")[-2], b.start[0], b.stop[0], place)
        for n, _, b, place in shape.pieces(LAYER[1], 0, 0)
    ]
    rows, place = 32, 0
    expected = []
    for group in range(2):
        for part, size in (("q_proj", 16), ("k_proj", 4), ("v_proj", 4)):
            expected.append((part, group * size, (group + 1) * size, place))
            place += size * rows
    assert found == expected


def test_gate_and_up_are_one_behind_the_other_on_each_rank():
    shape = RoleShape(LLAMA, "policy", ParallelLayout(tp=2), 1, 1)
    for rank, (start, stop) in itertools.product((1,), ((24, 48),)):
        found = [
            (n.split(".")[-2], b.start[0], b.stop[0], place)
            for n, _, b, place in shape.pieces(LAYER[4], 2, rank)
        ]
        assert found == [("gate_proj", start, stop, 0), ("up_proj", start, stop, 24 * 32)]


@pytest.mark.parametrize(
    ("multiple", "tp", "padded"), [(1, 1, 209), (1, 2, 210), (16, 1, 224), (128, 2, 256)]
)
def test_each_ranks_part_of_the_vocabulary_is_a_multiple(multiple, tp, padded):
    assert RoleShape(LLAMA, "policy", ParallelLayout(tp=tp), 1, multiple).padded_vocab == padded


def test_a_critic_has_one_output_and_no_tie():
    shape = RoleShape(QWEN, "value", ParallelLayout(), 1, 1)
    params = shape.params(torch.bfloat16)
    assert (
        params["score.weight"].shape == (1, 32)
        and "lm_head.weight" not in params
        and shape.ties == {}
    )
    assert RoleShape(QWEN, "policy", ParallelLayout(), 1, 1).ties == {
        "lm_head.weight": "model.embed_tokens.weight"
    }
