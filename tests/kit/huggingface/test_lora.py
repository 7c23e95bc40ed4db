"""Adapters of a role: W + scale B A by hand, and by peft."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from hybridflow.core.errors import ModelError
from hybridflow.core.values.model import ModelSpec
from hybridflow.core.values.weights import Box, LazyShard
from hybridflow.kit.huggingface.config import LoRAConfig
from hybridflow.kit.huggingface.modeling import RoleModel, build_hf_model, canonical
from hybridflow.kit.testing.models import reference

peft = pytest.importorskip("peft")
from hybridflow.kit.huggingface.lora import Adapters  # noqa: E402

CONFIG = LoRAConfig(rank=2, alpha=6.0, target_modules=("q_proj", "layers.1.mlp.down_proj"))
ADAPTED = [
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.1.self_attn.q_proj.weight",
    "model.layers.1.mlp.down_proj.weight",
]
IDS = torch.tensor([5, 17, 11, 2])


def adapted(config=CONFIG, seed=0, kind="policy", dtype=torch.float32):
    """A role with its adapters."""
    role = RoleModel(build_hf_model(reference("llama", kind).spec, dtype)[0], kind)
    return role, Adapters(role, config, seed)


def trained(role: RoleModel, adapters: Adapters) -> dict[str, torch.Tensor]:
    """The adapters as after some steps, by canonical name."""
    named = {canonical(name): p.data for name, p in role.hf.named_parameters()}
    whole = {name: named[name] for name in adapters.names}
    generator = torch.Generator().manual_seed(5)
    for name in sorted(whole):
        whole[name].copy_(torch.randn(whole[name].shape, generator=generator) * 0.2)
    return whole


def by_hand(name: str, whole: dict[str, torch.Tensor]) -> torch.Tensor:
    layer = name.removesuffix(".weight")
    product = whole[f"{layer}.lora_B.weight"] @ whole[f"{layer}.lora_A.weight"]
    return reference("llama").parameters[name] + 3.0 * product  # alpha / rank


def test_a_new_adapter_changes_nothing_and_is_all_that_is_trained():
    role, adapters = adapted(seed=4)
    assert sorted(adapters.of) == sorted(ADAPTED)
    trains = {canonical(name) for name, p in role.hf.named_parameters() if p.requires_grad}
    assert trains == adapters.names and len(trains) == 6
    with torch.no_grad():
        logits = role.hf(IDS[None]).logits[0]
        assert torch.equal(logits, adapted(seed=5)[0].hf(IDS[None]).logits[0])
        torch.testing.assert_close(logits, reference("llama").logits(IDS), atol=1e-5, rtol=1e-4)


def test_adapters_are_drawn_from_the_seed_and_leave_the_generator_alone():
    before = torch.get_rng_state()
    first, again, other = (dict(adapted(seed=seed)[0].hf.named_parameters()) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    name = "model.layers.0.self_attn.q_proj.lora_A.default.weight"
    assert torch.equal(first[name], again[name]) and not torch.equal(first[name], other[name])


def test_the_merged_weights_do_what_the_adapted_model_does():
    role, adapters = adapted()
    whole = trained(role, adapters)
    model = AutoModelForCausalLM.from_pretrained(reference("llama").spec.path)
    state = model.state_dict()
    for name, values in reference("llama").parameters.items():
        merged = adapters.merged(name, Box.full(values.shape), values, whole)
        state[name].copy_(merged)
        if name in ADAPTED:
            torch.testing.assert_close(merged, by_hand(name, whole))
        else:
            assert merged is values
    with torch.no_grad():
        found = model(IDS[None]).logits
        torch.testing.assert_close(found, role.hf(IDS[None]).logits, atol=1e-4, rtol=1e-4)
    assert (found[0] - reference("llama").logits(IDS)).abs().max() > 0.1


def test_a_box_is_merged_alone_and_when_it_is_read():
    role, adapters = adapted()
    whole = trained(role, adapters)
    name = ADAPTED[2]  # [32, 48]
    box, values = Box((5, 8), (9, 40)), reference("llama").parameters[name]
    shard = adapters.shard(name, box, values[box.slices()], whole)
    assert isinstance(shard, LazyShard) and shard.shape == (4, 32)
    wanted = by_hand(name, whole)[box.slices()]
    torch.testing.assert_close(shard[(slice(1, 3), slice(None))], wanted[1:3])
    whole[f"{name.removesuffix('.weight')}.lora_B.weight"].zero_()
    assert torch.equal(shard[(slice(None), slice(None))], values[box.slices()])

    empty = torch.empty(0, 48)
    assert adapters.merged(name, Box((4, 0), (4, 48)), empty, whole) is empty
    norm = reference("llama").parameters["model.norm.weight"]
    assert adapters.shard("model.norm.weight", Box.full(norm.shape), norm, whole) is norm


def test_without_names_every_linear_layer_of_the_trunk_has_one_and_a_new_head_is_trained():
    role, adapters = adapted(LoRAConfig(rank=1), kind="value", dtype=torch.bfloat16)
    assert len(adapters.of) == 2 * 7 and not any("score" in name for name in adapters.of)
    trained_dtypes = {p.dtype for p in role.hf.parameters() if p.requires_grad}
    frozen_dtypes = {p.dtype for p in role.hf.parameters() if not p.requires_grad}
    assert (trained_dtypes, frozen_dtypes) == ({torch.float32}, {torch.bfloat16})
    assert role.hf.score.weight.requires_grad


def test_names_that_are_no_linear_layers_are_told_with_those_that_there_are():
    wrong = LoRAConfig(target_modules=("q_proj", "proj", "lm_head", "norm"))
    with pytest.raises(ModelError) as caught:
        adapted(wrong)
    assert "is named 'proj', 'lm_head', 'norm'; it has 'q_proj', 'k_proj'" in str(caught.value)


def test_a_model_without_linear_layers_is_refused():
    fields = {"model_type": "gpt2", "vocab_size": 8, "n_embd": 16, "n_layer": 1, "n_head": 2}
    role = RoleModel(build_hf_model(ModelSpec(fields, None, 0), torch.float32)[0], "policy")
    # its matrices are Conv1D
    with pytest.raises(ModelError, match="a 'gpt2' model has no linear layers to adapt"):
        Adapters(role, LoRAConfig(), 0)


def test_the_exported_folder_is_what_peft_reads(tmp_path):
    role, adapters = adapted()
    adapters.export(trained(role, adapters), tmp_path / "adapter")
    model = AutoModelForCausalLM.from_pretrained(reference("llama").spec.path)
    loaded = peft.PeftModel.from_pretrained(model, str(tmp_path / "adapter"))
    with torch.no_grad():
        found = loaded(IDS[None]).logits
        torch.testing.assert_close(found, role.hf(IDS[None]).logits, atol=1e-4, rtol=1e-4)
