from __future__ import annotations

import os

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from hybridflow.kit.fakes.folder import write_hollow_folder
from hybridflow.kit.testing import tiny_config


def test_transformers_reads_a_hollow_folder_as_zeros(tmp_path):
    folder = write_hollow_folder(tmp_path / "qwen2", tiny_config("qwen2"), torch.float32)
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert all(not parameter.any() for parameter in model.parameters())


def test_a_large_one_takes_no_space_and_has_its_shapes(tmp_path):
    fields = tiny_config("llama") | {"hidden_size": 4096, "vocab_size": 100_000, "head_dim": 1024}
    folder = write_hollow_folder(tmp_path / "large", fields)
    file = folder / "model.safetensors"
    assert file.stat().st_size > 1_600_000_000  # two tables of 100,000 rows, of 8,192 bytes each
    assert os.stat(file).st_blocks * 512 < 1_000_000
    with safe_open(file, "pt") as tensors:
        rows = tensors.get_slice("lm_head.weight")
        assert rows.get_shape() == [100_000, 4096] and rows.get_dtype() == "BF16"
        assert not rows[7:9].any()


def test_a_larger_one_has_several_files_and_an_index(tmp_path, monkeypatch):
    monkeypatch.setattr("hybridflow.kit.fakes.folder.LARGEST", 4000)
    folder = write_hollow_folder(tmp_path / "qwen2", tiny_config("qwen2"), torch.float32)
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert all(not parameter.any() for parameter in model.parameters())
