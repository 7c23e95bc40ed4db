"""Writes safetensors files that all may read whom the umask lets read new files."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

import torch


def write_tensors(
    tensors: dict[str, torch.Tensor], file: Path, metadata: Mapping[str, str] | None = None
) -> None:
    """Write contiguous tensors of the host to a file. Raises OSError, of a full disk say."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, file, metadata=dict(metadata) if metadata else None)
    except SafetensorError as error:
        # It has the system's error in words only: "... (os error 28)".
        if (number := re.search(r"\(os error (\d+)\)", str(error))) is None:
            raise
        code = int(number[1])
        raise OSError(code, os.strerror(code), str(file)) from None
    # safetensors lets the owner alone read it.
    file.chmod(0o666 & ~_umask())


def _umask() -> int:
    """Return the mask of new files' modes, which can only be read by setting it."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
