"""Writes a Hugging Face folder from whole parameters."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hybridflow.core.contracts.worker import RankContext
from hybridflow.core.processes.page import moved
from hybridflow.kit.tensor_files import write_tensors

FILE_BYTES = 5 * 10**9
"""The most bytes of a file, unless a single parameter has more."""
INDEX = "model.safetensors.index.json"


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
    rank 0 and writes further files into the folder.
    """
    # All ranks read, since reading gathers a parameter; only rank 0 has to keep it.
    files = _Files(folder)
    failure: Exception | None = None
    for name, whole in parameters:
        if context.rank == 0 and failure is None:
            # A full disk must not leave the other ranks waiting in a collective call.
            try:
                files.add(name, whole.to("cpu", dtype, copy=True).contiguous())
            except Exception as error:
                failure = error

    # Rank 0 meets the others at the barrier even where it fails, so that none waits for ever.
    try:
        if failure is not None:
            raise failure
        if context.rank == 0:
            files.finish()
            _describe(hf, config, generation, dtype, folder)
            if more is not None:
                more()
    finally:
        if context.world_size > 1:
            dist.barrier()


class _Files:
    """Safetensors files, each written as soon as it is full: rank 0 holds one of them at a time."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.written: list[list[str]] = []
        """The names of the tensors in each file."""
        self.nbytes = 0
        """Bytes of all tensors."""
        self._tensors: dict[str, torch.Tensor] = {}
        self._held = 0

    def add(self, name: str, values: torch.Tensor) -> None:
        """Add a tensor to the open file; if it does not fit, that file is written first."""
        moved()
        # A parameter that is larger than a file has one to itself.
        if self._tensors and self._held + values.nbytes > FILE_BYTES:
            self._write()
        self._tensors[name] = values
        self._held += values.nbytes
        self.nbytes += values.nbytes

    def finish(self) -> None:
        """Write the last file, and rename all of them to transformers' names."""
        # The number of files is known only now.
        self._write()
        count = len(self.written)
        names = ["model.safetensors"]
        if count > 1:
            names = [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
        for number, name in enumerate(names):
            self._part(number).rename(self.folder / name)

        # Several files have an index that says which parameter is in which.
        if count > 1:
            places = {}
            for name, inside in zip(names, self.written, strict=True):
                places.update(dict.fromkeys(inside, name))
            index = {"metadata": {"total_size": self.nbytes}, "weight_map": places}
            (self.folder / INDEX).write_text(json.dumps(index, indent=2))

    def _write(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        write_tensors(self._tensors, self._part(len(self.written)), {"format": "pt"})
        self.written.append(list(self._tensors))
        self._tensors = {}
        self._held = 0

    def _part(self, number: int) -> Path:
        """Return the temporary name of a file, while the number of files is not known."""
        return self.folder / f"model.safetensors.part{number}"


def _describe(hf: type, config: Any, generation: Any, dtype: torch.dtype, folder: Path) -> None:
    """Write the config, and the generation config."""
    # fully_shard puts "FSDP" before the name of the model's class.
    config.architectures = [hf.__name__.removeprefix("FSDP")]
    config.dtype = dtype
    config.save_pretrained(folder)
    if generation is not None:
        generation.save_pretrained(folder)
