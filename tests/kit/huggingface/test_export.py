"""A Hugging Face folder from whole parameters, read back by transformers."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, GenerationConfig, Qwen2ForCausalLM

from hybridflow.kit.huggingface import export
from hybridflow.kit.huggingface.export import export_role
from hybridflow.kit.huggingface.models import policy_config
from hybridflow.kit.testing import one_rank
from hybridflow.kit.testing.models import reference


def exported(folder, hf=Qwen2ForCausalLM, dtype=torch.float32, generation=None, more=None):
    ref = reference("qwen2")
    config = policy_config(ref.spec)
    parameters = ((name, values) for name, values in ref.parameters.items())
    with one_rank() as context:
        export_role(parameters, hf, config, generation, folder, dtype, context, more)
    return ref


def test_the_folder_loads_with_the_same_weights_and_says_the_same(tmp_path):
    ref = exported(tmp_path / "new" / "actor")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "new" / "actor")
    assert isinstance(model, Qwen2ForCausalLM) and model.dtype == torch.float32
    ids = torch.tensor([[5, 17, 11, 2]])
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits[0], ref.logits(ids[0]), atol=1e-5, rtol=1e-4)
    with safe_open(tmp_path / "new/actor/model.safetensors", "pt") as file:
        assert set(file.keys()) == set(ref.parameters)
        assert file.metadata() == {"format": "pt"}
    modes = {file.stat().st_mode for file in (tmp_path / "new/actor").iterdir()}
    assert len(modes) == 1  # who reads one file reads all
    assert not (tmp_path / "new/actor/generation_config.json").exists()


class FSDPQwen2ForCausalLM(Qwen2ForCausalLM):
    """As fully_shard names the class of what it has wrapped."""


def test_it_is_written_in_the_dtype_asked_for_under_the_name_of_the_plain_class(tmp_path):
    ref = exported(tmp_path, FSDPQwen2ForCausalLM, torch.bfloat16)
    fields = json.loads((tmp_path / "config.json").read_text())
    assert (fields["architectures"], fields["dtype"]) == (["Qwen2ForCausalLM"], "bfloat16")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    norm = model.model.norm.weight
    assert torch.equal(norm, ref.parameters["model.norm.weight"].bfloat16())


def test_the_generation_settings_and_what_else_belongs_there_are_written_too(tmp_path):
    def more() -> None:
        assert (tmp_path / "config.json").exists()  # the folder is there already
        (tmp_path / "more.txt").write_text("adapters, say")

    exported(tmp_path, generation=GenerationConfig(max_new_tokens=77), more=more)
    assert GenerationConfig.from_pretrained(tmp_path).max_new_tokens == 77
    assert (tmp_path / "more.txt").exists()


def test_parameters_are_kept_although_their_storage_is_used_again(tmp_path):
    """A backend may give one buffer after the other: what it yields is good until the next one."""
    ref, buffer = reference("qwen2"), torch.empty(40_000)

    def one_after_the_other():
        for name, values in ref.parameters.items():
            flat = buffer[: values.numel()]
            flat.copy_(values.flatten())
            yield name, flat.view(values.shape)

    with one_rank() as context:
        config = policy_config(ref.spec)
        given = (one_after_the_other(), Qwen2ForCausalLM, config, None)
        export_role(*given, tmp_path, torch.float32, context)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        for name, values in ref.parameters.items():
            assert torch.equal(file.get_tensor(name), values), name


def test_large_models_are_written_file_by_file_with_an_index(tmp_path, monkeypatch):
    held: list[int] = []
    plain = export._Files.add

    def noted(self, name, values):
        plain(self, name, values)
        held.append(sum(t.nbytes for t in self._tensors.values()))

    monkeypatch.setattr(export, "FILE_BYTES", 20_000)
    monkeypatch.setattr(export._Files, "add", noted)
    ref = exported(tmp_path)
    assert max(held) <= 20_000
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in tmp_path.glob("*.safetensors*"))
    assert files == [*sorted(set(index["weight_map"].values())), "model.safetensors.index.json"]
    assert index["metadata"]["total_size"] == sum(v.nbytes for v in ref.parameters.values())
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, values in ref.parameters.items():
        assert torch.equal(model.state_dict()[name], values), name


def test_a_disk_that_is_full_is_told_after_all_have_been_read(tmp_path, monkeypatch):
    read = []

    def parameters():
        for name, values in reference("qwen2").parameters.items():
            yield name, values
            read.append(name)

    def full(*args, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export, "FILE_BYTES", 1)
    monkeypatch.setattr("safetensors.torch.save_file", full)
    with one_rank() as context, pytest.raises(OSError, match="No space left"):
        config = policy_config(reference("qwen2").spec)
        export_role(parameters(), Qwen2ForCausalLM, config, None, tmp_path, torch.float32, context)
    assert len(read) == len(reference("qwen2").parameters)  # reading is collective
