"""A Hugging Face folder from whole parameters."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hybridflow.core.contracts.worker import RankContext


def export_role(
    parameters: Iterable[tuple[str, torch.Tensor]], hf: type, config: Any, generation: Any, folder: Path,
    dtype: torch.dtype, context: RankContext, more: Callable[[], None] | None = None,
) -> None:  # fmt: skip
    """config.json, generation_config.json (of `generation`, if not None) and model*.safetensors, written by rank 0; loads
    with AutoModel.from_pretrained.

    parameters: (canonical name, whole tensor), read to its end on every rank; hf: the model's class; config: its
    PretrainedConfig; more: called on rank 0, writes what else belongs into the folder. Collective.
    """
    tensors = {}
    for name, whole in parameters:
        if context.rank == 0:
            tensors[name] = whole.to("cpu", dtype, copy=True).contiguous()
    try:
        if context.rank == 0:
            _write(hf, config, generation, tensors, folder)
            if more is not None:
                more()
    finally:
        if context.world_size > 1:
            dist.barrier()


def _write(
    hf: type, config: Any, generation: Any, tensors: dict[str, torch.Tensor], folder: Path
) -> None:
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    config.architectures = [hf.__name__.removeprefix("FSDP")]
    config.dtype = next(iter(tensors.values())).dtype
    config.save_pretrained(folder)
    if generation is not None:
        generation.save_pretrained(folder)
    split = split_torch_state_dict_into_shards(tensors, max_shard_size="5GB")
    for file, names in split.filename_to_tensors.items():
        save_file({name: tensors[name] for name in names}, folder / file, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
