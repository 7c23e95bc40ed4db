"""Model folders that take no disk space: safetensors files with holes instead of values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch

from hybridflow.kit.huggingface.models import saved_parameters

DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
"""dtype -> its name in safetensors files."""
LARGEST = 5_000_000_000
"""Bytes of a file, at most; a larger parameter has one of its own."""


def write_hollow_folder(
    folder: Path, fields: Mapping[str, Any], dtype: torch.dtype = torch.bfloat16
) -> Path:
    """Write a folder that looks like a saved policy, and return it; all its values are zeros.

    fields: those of the Hugging Face config, model_type among them.
    """
    from transformers import AutoConfig

    # Names and shapes are those that transformers saves.
    fields = dict(fields)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    shapes, _ = saved_parameters(config)
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)

    # Readers map a whole file into memory, which fails for one of a hundred GB.
    parts: list[dict[str, tuple[int, ...]]] = [{}]
    size = 0
    for name, shape in shapes.items():
        nbytes = prod(shape) * dtype.itemsize
        if parts[-1] and size + nbytes > LARGEST:
            parts.append({})
            size = 0
        parts[-1][name] = shape
        size += nbytes
    if len(parts) == 1:
        _write(folder / "model.safetensors", shapes, dtype)
        return folder

    # Several files have an index.
    index: dict[str, str] = {}
    for number, part in enumerate(parts, 1):
        file = f"model-{number:05}-of-{len(parts):05}.safetensors"
        _write(folder / file, part, dtype)
        index |= dict.fromkeys(part, file)
    text = json.dumps({"metadata": {}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text)
    return folder


def _write(path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> None:
    """Write one file: the length of its header, the header, and a hole for the values."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": DTYPES[dtype],
            "shape": list(shape),
            "data_offsets": [offset, end],
        }
        offset = end
    # A file that is lengthened without being written has a hole.
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        file.truncate(file.tell() + offset)
