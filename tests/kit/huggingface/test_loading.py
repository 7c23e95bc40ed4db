from __future__ import annotations

import json
import logging

import attrs
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from hybridflow.core.errors import ModelError
from hybridflow.core.values.model import ModelConfig, ModelSpec
from hybridflow.core.values.weights import Box
from hybridflow.kit.huggingface import loading
from hybridflow.kit.huggingface.loading import Folder, allocate, empty_model, fill, move_buffers
from hybridflow.kit.huggingface.saved import SavedForm
from hybridflow.kit.testing import reference, tiny_config
from hybridflow.settle.models import resolve_model

CPU = torch.device("cpu")
ROUTED = {
    "model_type": "deepseek_v3", "vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "intermediate_size": 48, "max_position_embeddings": 64, "n_routed_experts": 4, "n_group": 2,
    "num_experts_per_tok": 2, "topk_group": 1, "moe_intermediate_size": 16, "q_lora_rank": 8, "kv_lora_rank": 8,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 1,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    """`folder(fields)`: a model that transformers has written, bfloat16, with values everywhere."""

    def write(fields: dict) -> str:
        fields = dict(fields)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(fields.pop("model_type"), **fields), dtype=torch.bfloat16
        )
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                if tensor.is_floating_point():
                    tensor.add_(0.3 * torch.randn_like(tensor))
        model.save_pretrained(tmp_path / "model")
        return str(tmp_path / "model")

    return write


def filled(spec: ModelSpec, dtype: torch.dtype, device: torch.device = CPU):
    model, _ = empty_model(spec, dtype)
    form = SavedForm.of(model)
    move_buffers(model, device)
    allocate(model, device)
    tied = model.all_tied_weights_keys
    stored = [(n, Box.full(t.shape), t) for n, t in model.state_dict().items() if n not in tied]
    for _, _, tensor in stored:
        tensor.fill_(7.0)
    fill(form.shards(stored), spec, dtype)
    return model


@pytest.mark.parametrize("kind", ["policy", "value"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "fields", [tiny_config("qwen2"), tiny_config("llama"), tiny_config("qwen3_moe"), ROUTED], ids=lambda f: f["model_type"]
)  # fmt: skip
def test_every_value_is_that_which_transformers_reads(folder, fields, dtype, kind, monkeypatch):
    def whole(*args):
        raise AssertionError("the folder has the form that is read box by box")

    monkeypatch.setattr(loading, "_from_whole", whole)
    spec = resolve_model(ModelConfig(path=folder(fields)), kind, "x")
    found = filled(spec, dtype)
    auto = AutoModelForCausalLM if kind == "policy" else AutoModelForSequenceClassification
    config = AutoConfig.from_pretrained(spec.path)
    if kind != "policy":
        config.num_labels, config.pad_token_id = 1, 0
    torch.manual_seed(spec.init_seed)  # the head is drawn from it
    expected = auto.from_pretrained(spec.path, config=config, dtype=dtype)
    for of in (lambda m: dict(m.named_parameters()), lambda m: dict(m.named_buffers())):
        theirs, ours = of(expected), of(found)
        assert theirs.keys() == ours.keys()
        for name, values in theirs.items():
            assert ours[name].dtype == values.dtype and torch.equal(ours[name], values), name


def test_only_boxes_are_asked_of_the_files(tmp_path, monkeypatch):
    values = torch.arange(24.0).view(4, 6)
    save_file({"a": values, "b": torch.tensor(3.0)}, tmp_path / "model.safetensors")
    part, number = torch.empty(2, 3), torch.empty(())
    Folder.of(tmp_path).read([("a", Box((1, 3), (3, 6)), part), ("b", Box((), ()), number)])
    assert torch.equal(part, values[1:3, 3:6]) and number == 3.0


def test_several_files_have_an_index(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "x.safetensors")
    save_file({"b": torch.zeros(2)}, tmp_path / "y.safetensors")
    index = {"weight_map": {"a": "x.safetensors", "b": "y.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert Folder.of(tmp_path).files == {"a": "x.safetensors", "b": "y.safetensors"}


NEOX = {
    "model_type": "gpt_neox", "vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "intermediate_size": 48, "tie_word_embeddings": True,
}  # fmt: skip
"""Tied, and its head has another name in files than in the model."""


@pytest.mark.parametrize("fields", [tiny_config("llama"), NEOX], ids=["llama", "gpt_neox tied"])
def test_a_model_without_a_folder_is_drawn_as_transformers_draws_it(fields):
    found = filled(ModelSpec(fields, None, 5), torch.float32)
    fields = dict(fields)
    torch.manual_seed(5)
    expected = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(fields.pop("model_type"), **fields), dtype=torch.float32
    )
    for name, values in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], values), name


def test_random_numbers_of_the_caller_stay_as_they_were():
    spec = reference("llama", "value").spec
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    filled(spec, torch.float32)
    assert torch.rand(1) == expected


def test_names_of_another_form_are_left_to_transformers(folder, caplog):
    path = folder(tiny_config("llama"))
    file = f"{path}/model.safetensors"
    tensors = load_file(file)
    save_file(
        {n.removeprefix("model."): t for n, t in tensors.items()}, file, metadata={"format": "pt"}
    )
    spec = resolve_model(ModelConfig(path=path), "policy", "x")
    with caplog.at_level(logging.INFO):
        found = filled(spec, torch.float32)
    assert "transformers reads it whole" in caplog.text
    assert torch.equal(found.model.norm.weight, tensors["model.norm.weight"].float())


def test_a_parameter_that_the_folder_lacks_is_named(folder):
    path = folder(tiny_config("llama"))
    file = f"{path}/model.safetensors"
    tensors = load_file(file)
    del tensors["model.norm.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"has no model\.norm\.weight, which this llama needs"):
        filled(resolve_model(ModelConfig(path=path), "policy", "x"), torch.float32)


def test_another_shape_is_told_with_the_file(folder):
    path = folder(tiny_config("llama"))
    file = f"{path}/model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"] = torch.ones(31)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"model\.norm\.weight has shape \[31\]"):
        filled(resolve_model(ModelConfig(path=path), "policy", "x"), torch.float32)


def test_ties_stay_and_nothing_has_memory_before():
    spec = reference("qwen2").spec
    model, config = empty_model(spec, torch.float32)
    assert (
        all(parameter.is_meta for parameter in model.parameters()) and config.model_type == "qwen2"
    )
    assert not any(buffer.is_meta for buffer in model.buffers())
    allocate(model, CPU)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not any(parameter.is_meta for parameter in model.parameters())


Q_PROJ, EMBEDDING = "model.layers.1.self_attn.q_proj.weight", "model.embed_tokens.weight"
PARTS = [
    (Q_PROJ, Box((8, 0), (16, 32))),
    (Q_PROJ, Box((0, 0), (2, 32))),
    (EMBEDDING, Box((3, 4), (5, 9))),
]


def boxes_of(spec, parts=PARTS) -> list[torch.Tensor]:
    storage = [torch.full(box.shape, torch.nan) for _, box in parts]
    fill(
        [(name, box, values) for (name, box), values in zip(parts, storage, strict=True)],
        spec,
        torch.float32,
    )
    return storage


def test_a_rank_reads_its_boxes_of_a_folder():
    ref = reference("llama")
    for (name, box), values in zip(PARTS, boxes_of(ref.spec), strict=True):
        assert torch.equal(values, ref.parameters[name][box.slices()])


def test_a_head_that_the_folder_lacks_is_drawn_and_the_rest_read():
    ref = reference("llama")
    spec = attrs.evolve(ref.spec, kind="value")
    [row, head] = boxes_of(spec, [PARTS[1], ("score.weight", Box((0, 0), (1, 32)))])
    assert torch.equal(row, ref.parameters[Q_PROJ][:2])
    assert head.isfinite().all() and head.abs().max() > 0
    assert torch.equal(
        boxes_of(spec, [("score.weight", Box((0, 0), (1, 32)))])[0], head
    )  # from the seed


def test_a_part_that_neither_folder_nor_model_has_is_named():
    name = "model.layers.0.self_attn.q_norm.weight"
    with pytest.raises(ModelError, match=rf"has no {name}"):
        boxes_of(reference("llama").spec, [(name, Box((0,), (8,)))])


def test_the_dtypes_of_a_folder_s_tensors_are_known_without_reading_them(tmp_path):
    from safetensors.torch import save_file

    save_file(
        {"a": torch.ones(3, 2, dtype=torch.bfloat16), "n": torch.tensor(1.0)},
        tmp_path / "x.safetensors",
    )
    save_file({"b": torch.ones(2, dtype=torch.int8)}, tmp_path / "y.safetensors")
    assert Folder.of(tmp_path).dtypes() == {
        "a": torch.bfloat16,
        "n": torch.float32,
        "b": torch.int8,
    }
