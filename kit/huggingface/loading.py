"""Loads models that do not fit a host: built on meta, cut into shards, then read box by box.

    empty_model      parameters on meta: shapes and dtypes, no memory
        |            (a backend cuts the model into shards)
    allocate         memory for this rank's shards, on its device
        |
    fill             each box is read from the safetensors files, and nothing else

What transformers does beside reading (converting old names, dequantising, drawing new weights) is
left to transformers: such a model is built whole on the host, and its boxes are copied.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import nn
from transformers import PretrainedConfig

from hybridflow.core.errors import ModelError
from hybridflow.core.values.model import ModelSpec
from hybridflow.core.values.weights import Box
from hybridflow.kit.huggingface.modeling import (
    HEAD,
    build_hf_model,
    hf_config,
    model_errors,
    quiet,
    running_config,
)
from hybridflow.kit.huggingface.models import auto_class

logger = logging.getLogger(__name__)

Part = tuple[str, Box, torch.Tensor]
"""(canonical name, box, the tensor that gets the box's values)."""


# --- a model without memory ---


def empty_model(spec: ModelSpec, dtype: torch.dtype) -> tuple[Any, PretrainedConfig]:
    """Return the model with its saved tensors on meta, in `dtype`, and its config.

    Buffers that are not saved (rotary frequencies, say) are on the CPU and have their values.
    Raises ModelError when transformers cannot build the model.
    """
    config = hf_config(spec)
    running = running_config(config)
    # A model draws nothing on meta, but some ask for random numbers elsewhere.
    with (
        model_errors(f"could not build {config.model_type!r} from its config"),
        quiet(),
        torch.random.fork_rng(devices=[]),
        torch.device("meta"),
    ):
        model = auto_class(spec.kind).from_config(running, dtype=dtype)

    if spec.path is not None:
        _widen(model, dtype)
    _compute_buffers(model)
    return model, config


def _widen(model: Any, dtype: torch.dtype) -> None:
    """Make those parameters float32 that transformers keeps in float32 for any `dtype`."""
    # Names or patterns, of which most models have none.
    wide = model._get_dtype_plan(dtype)
    if not wide:
        return
    from transformers.core_model_loading import build_glob_alternation

    pattern, _, _ = build_glob_alternation(list(wide))
    for name, tensor in model.state_dict().items():
        if pattern.search(name):
            owner, _, key = name.rpartition(".")
            wider = torch.empty_like(tensor, dtype=torch.float32)
            _replace(model.get_submodule(owner), key, wider)


def _replace(module: nn.Module, key: str, tensor: torch.Tensor) -> None:
    """Replace a module's parameter or buffer by a tensor."""
    if key in module._buffers:
        module._buffers[key] = tensor
    else:
        module._parameters[key] = nn.Parameter(tensor)


def _compute_buffers(model: Any) -> None:
    """Let transformers compute the buffers that checkpoints do not have."""
    for name, buffer in list(model.named_non_persistent_buffers()):
        owner, _, key = name.rpartition(".")
        model.get_submodule(owner)._buffers[key] = torch.empty_like(buffer, device="cpu")
    _initialize(model, seed=0)


def _initialize(model: Any, seed: int) -> None:
    """Run transformers' initialisation, seeded by `seed`, on the tensors that are not on meta."""
    # It skips marked tensors, and modules that it has initialised on meta already.
    skipped = [tensor for tensor in model.state_dict(keep_vars=True).values() if tensor.is_meta]
    for tensor in skipped:
        tensor._is_hf_initialized = True
    for module in model.modules():
        module._is_hf_initialized = False

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model.initialize_weights()
    for tensor in skipped:
        vars(tensor).pop("_is_hf_initialized", None)


def move_buffers(module: nn.Module, device: torch.device) -> None:
    """Move the buffers to the device; those on meta are allocated there, with undefined values."""
    for owner in module.modules():
        for key, buffer in owner._buffers.items():
            if buffer is not None and buffer.is_meta:
                owner._buffers[key] = torch.empty_like(buffer, device=device)
            elif buffer is not None:
                owner._buffers[key] = buffer.to(device)


def allocate(module: nn.Module, device: torch.device) -> None:
    """Allocate the module's meta tensors on the device, with undefined values.

    Parameters that are shared stay shared, and sharded ones (DTensors) get memory for this rank's
    shard alone.
    """
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for owner in module.modules():
        for key, parameter in owner._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((owner, key))

    def give(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor

    # torch makes a new parameter for each name, also for two names of one.
    module._apply(give)
    for (first, key), *others in places.values():
        for owner, other in others:
            owner._parameters[other] = first._parameters[key]


# --- the values of the parameters ---


@torch.no_grad()
def fill(parts: Iterable[Part], spec: ModelSpec, dtype: torch.dtype) -> None:
    """Write the model's initial values into the parts, which are this rank's boxes.

    Only these boxes are read from the folder. The head of a value or score model that the folder
    lacks is drawn from `init_seed`. A model without a folder, and one whose folder has another form
    than transformers saves, is built whole in `dtype` on the host. Raises ModelError when the
    folder lacks a parameter, or has it with another shape.
    """
    wanted = list(parts)
    if spec.path is None:
        _from_whole(wanted, spec, dtype)
        return

    # Files of another form, and quantised ones, are left to transformers.
    folder = Folder.of(Path(spec.path))
    names = {name for name, *_ in wanted}
    lacking = names - folder.files.keys()
    heads = {name for name in lacking if spec.kind != "policy" and name.startswith(HEAD)}
    if spec.hf_config.get("quantization_config") or lacking - heads:
        first = min(lacking - heads, default="its quantised weights")
        logger.info("%s: transformers reads it whole, because of %s", spec.path, first)
        _from_whole(wanted, spec, dtype)
        return

    # The head of a value or score model may be new.
    folder.read([part for part in wanted if part[0] not in heads])
    if heads:
        _draw_head([part for part in wanted if part[0] in heads], spec, dtype)


@attrs.frozen
class Folder:
    """The safetensors files of a model."""

    path: Path
    files: Mapping[str, str]
    """Name of a tensor -> name of its file."""

    @classmethod
    def of(cls, path: Path) -> Folder:
        """Return the tensors of a folder by file; none if it has no safetensors files."""
        from safetensors import safe_open

        # Several files have an index.
        index = path / "model.safetensors.index.json"
        if index.exists():
            return cls(path, json.loads(index.read_text())["weight_map"])
        files = {}
        for file in sorted(path.glob("*.safetensors")):
            with safe_open(file, "pt") as tensors:
                files.update(dict.fromkeys(tensors.keys(), file.name))
        return cls(path, files)

    def dtypes(self) -> dict[str, torch.dtype]:
        """Return the dtype of each tensor."""
        from safetensors import safe_open

        dtypes = {}
        for file in sorted(set(self.files.values())):
            with safe_open(self.path / file, "pt") as tensors:
                for name in (name for name, of in self.files.items() if of == file):
                    # A view of no elements, whose dtype torch names
                    values = tensors.get_slice(name)
                    none = values[:0] if values.get_shape() else values[...]
                    dtypes[name] = none.dtype
        return dtypes

    def read(self, parts: Sequence[Part]) -> None:
        """Copy the parts' boxes from the files; nothing else is read."""
        from safetensors import safe_open

        # Each file is opened once.
        by_file: dict[str, list[Part]] = {}
        for part in parts:
            by_file.setdefault(self.files[part[0]], []).append(part)
        for file, here in by_file.items():
            # Closing a file frees the pages that were read.
            with safe_open(self.path / file, "pt") as tensors:
                for name, box, storage in here:
                    values = tensors.get_slice(name)
                    shape = tuple(values.get_shape())
                    if len(shape) != len(box.stop) or any(
                        stop > size for stop, size in zip(box.stop, shape, strict=True)
                    ):
                        raise ModelError(
                            f"{self.path / file}: {name} has shape {list(shape)}, and the model's "
                            f"config asks for the box {box} of it"
                        )
                    storage.copy_(_pieces(values, box).reshape(storage.shape))


def _pieces(values: Any, box: Box) -> torch.Tensor:
    """Return the values of a box from a tensor in a file."""
    # safetensors has no slices of a number.
    if not box.start:
        return values[...]
    return values[box.slices()]


def _from_whole(wanted: Sequence[Part], spec: ModelSpec, dtype: torch.dtype) -> None:
    """Copy the parts' boxes from the whole model, built on the host as transformers builds it."""
    from hybridflow.kit.huggingface.saved import SavedForm

    # One whole model per rank, for as long as this takes.
    hf, _ = build_hf_model(spec, dtype)
    by_name: dict[str, list[Part]] = {}
    for part in wanted:
        by_name.setdefault(part[0], []).append(part)
    for name, values in SavedForm.of(hf).whole(hf.state_dict().items()):
        for _, box, storage in by_name.pop(name, ()):
            storage.copy_(values[box.slices()].reshape(storage.shape))
    if by_name:
        raise ModelError(f"{spec.path or 'the model'} has no {min(by_name)}, which it needs")


def _draw_head(wanted: Sequence[Part], spec: ModelSpec, dtype: torch.dtype) -> None:
    """Draw the new head of a value or score model by transformers' initialisation."""
    hf, _ = empty_model(spec, dtype)
    # The head alone gets memory.
    head = hf.score
    for key, parameter in head.named_parameters(recurse=False):
        _replace(head, key, torch.empty_like(parameter, device="cpu"))

    # Models may draw beside it, so the whole initialisation is run.
    _initialize(hf, spec.init_seed)
    values = {f"{HEAD}{name}": parameter for name, parameter in head.named_parameters()}
    for name, box, storage in wanted:
        storage.copy_(values[name][box.slices()].reshape(storage.shape))
