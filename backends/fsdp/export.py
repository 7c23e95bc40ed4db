"""A Hugging Face folder from whole tensors."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from transformers import PretrainedConfig, PreTrainedModel


def write_hf_folder(
    hf: PreTrainedModel, config: PretrainedConfig, tensors: dict[str, torch.Tensor], folder: Path
) -> None:
    """config.json, generation_config.json and model*.safetensors; loads with AutoModel.from_pretrained."""
    folder.mkdir(parents=True, exist_ok=True)
    config.architectures = [type(hf).__name__.removeprefix("FSDP")]
    config.dtype = next(iter(tensors.values())).dtype
    config.save_pretrained(folder)
    if getattr(hf, "generation_config", None) is not None:
        hf.generation_config.save_pretrained(folder)
    split = split_torch_state_dict_into_shards(tensors, max_shard_size="5GB")
    for file, names in split.filename_to_tensors.items():
        save_file({name: tensors[name] for name in names}, folder / file, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
