"""Canonical parameters are those of the safetensors that transformers writes."""

from __future__ import annotations

import pytest
import torch

from hybridflow.core.errors import ModelError
from hybridflow.core.values.weights import Box, LazyShard
from hybridflow.kit.huggingface import saved
from hybridflow.kit.huggingface.saved import SavedForm
from hybridflow.kit.layouts import zero3_layout

SMALL = {
    "vocab_size": 31,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
MLA = {
    "kv_lora_rank": 8,
    "q_lora_rank": None,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 8,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 2,
}
MODELS = {
    "qwen2": {},
    "gemma2": {"head_dim": 8},  # tied
    "phi3": {},  # q, k and v fused on disk
    "qwen3_moe": EXPERTS | {"head_dim": 8},
    "mixtral": {"num_local_experts": 3},
    "deepseek_v2": MLA,
    "granitemoe": {"num_local_experts": 3},
}


def model_of(model_type: str):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, **SMALL | MODELS[model_type])
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(config)


def stored_of(model) -> dict[str, torch.Tensor]:
    """Return the model's own parameters, tied ones once."""
    return {name: values.detach() for name, values in model.named_parameters()}


@pytest.fixture(params=MODELS)
def case(request, tmp_path):
    """(model, its form, the tensors of its safetensors)."""
    from safetensors.torch import load_file

    model = model_of(request.param)
    model.save_pretrained(tmp_path)
    return model, SavedForm.of(model), load_file(tmp_path / "model.safetensors")


def test_names_and_shapes_are_those_of_the_file(case):
    _, form, expected = case
    assert dict(form.shapes) == {name: tuple(v.shape) for name, v in expected.items()}
    assert not set(form.ties) & set(expected)


def test_whole_parameters_are_those_of_the_file(case):
    model, form, expected = case
    found = dict(form.whole(stored_of(model).items()))
    assert found.keys() == expected.keys()
    for name, values in found.items():
        assert torch.equal(values, expected[name]), name


def test_flat_shards_of_three_ranks_make_up_the_file(case):
    # ZeRO-3 cuts parameters anywhere, also within an expert.
    model, form, expected = case
    stored = stored_of(model)
    layout = SavedForm({}, {}, {}).layout(
        zero3_layout({n: saved.Param(tuple(v.shape), v.dtype) for n, v in stored.items()}, 3)
    )
    canonical = form.layout(layout)
    assert dict(canonical.params).keys() == expected.keys()

    found = {name: torch.full(v.shape, float("nan")) for name, v in expected.items()}
    for rank in range(3):
        shards = [
            (name, box, stored[name][box.slices()])
            for name, boxes in layout.held[rank].items()
            for box in boxes
        ]
        boxes: dict[str, list[Box]] = {}
        for name, box, values in form.shards(shards):
            found[name][box.slices()] = values
            boxes.setdefault(name, []).append(box)
        held = {n: list(b) for n, b in canonical.held[rank].items() if b}
        assert {n: sorted(map(str, b)) for n, b in held.items()} == {
            n: sorted(map(str, b)) for n, b in boxes.items()
        }
    for name, values in found.items():
        assert torch.equal(values, expected[name]), name


def test_shards_are_views(case):
    model, form, _ = case
    stored = stored_of(model)
    storages = {values.untyped_storage().data_ptr() for values in stored.values()}
    shards = [(name, Box.full(values.shape), values) for name, values in stored.items()]
    for _, _, values in form.shards(shards):
        assert values.untyped_storage().data_ptr() in storages


def test_a_lazy_shard_stays_lazy():
    model = model_of("qwen3_moe")
    form = SavedForm.of(model)
    name = "model.layers.0.mlp.experts.down_proj"
    values = stored_of(model)[name]
    reads = []

    def make():
        reads.append(1)
        return values

    found = list(form.shards([(name, Box.full(values.shape), LazyShard(values.shape, make))]))
    assert not reads
    name, box, lazy = found[1]
    assert name == "model.layers.0.mlp.experts.1.down_proj.weight"
    assert torch.equal(lazy[box.slices()], values[1])
    assert reads


def test_a_form_that_no_boxes_describe_is_refused(monkeypatch):
    model = model_of("qwen2")
    monkeypatch.setattr(
        saved, "_revert", lambda model, stored: {n: v * 2 for n, v in stored.items()}
    )
    with pytest.raises(ModelError, match=r"Qwen2ForCausalLM: transformers saves .*it is computed"):
        SavedForm.of(model)
