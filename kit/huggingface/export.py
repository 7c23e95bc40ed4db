"""Writes a Hugging Face folder from whole parameters."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hybridflow.core.contracts.worker import RankContext


def export_role(
    parameters: Iterable[tuple[str, torch.Tensor]],
    hf: type,
    config: Any,
    generation: Any,
    folder: Path,
    dtype: torch.dtype,
    context: RankContext,
    more: Callable[[], None] | None = None,
) -> None:
    """Write a folder that AutoModel.from_pretrained loads; rank 0 writes. Collective.

    The folder gets config.json, model*.safetensors in `dtype`, and generation_config.json unless
    `generation` is None. `parameters` yields (canonical name, whole tensor) and is read to its end
    on every rank. `hf` is the model's class, `config` its PretrainedConfig. `more` is called on
    rank 0 and writes what else belongs into the folder.
    """
    # All ranks read, since reading gathers a parameter; only rank 0 has to keep it.
    tensors = {}
    for name, whole in parameters:
        if context.rank == 0:
            tensors[name] = whole.to("cpu", dtype, copy=True).contiguous()

    # Rank 0 meets the others at the barrier even where it fails, so that none waits for ever.
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

    # fully_shard puts "FSDP" before the name of the model's class.
    folder.mkdir(parents=True, exist_ok=True)
    config.architectures = [hf.__name__.removeprefix("FSDP")]
    config.dtype = next(iter(tensors.values())).dtype
    config.save_pretrained(folder)
    if generation is not None:
        generation.save_pretrained(folder)

    # Several files have an index that says which parameter is in which.
    split = split_torch_state_dict_into_shards(tensors, max_shard_size="5GB")
    for file, names in split.filename_to_tensors.items():
        content = {name: tensors[name] for name in names}
        save_file(content, folder / file, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
