"""Safetensors files have the mode of other new files."""

from __future__ import annotations

import os

import pytest
import torch
from safetensors import safe_open

from hybridflow.kit.tensor_files import write_tensors


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o007, 0o660)])
def test_a_file_has_the_mode_of_new_files(tmp_path, mask, mode):
    before = os.umask(mask)
    try:
        write_tensors({"a": torch.arange(3)}, tmp_path / "x.safetensors", {"format": "pt"})
        assert (tmp_path / "x.safetensors").stat().st_mode & 0o777 == mode
        assert os.umask(mask) == mask
    finally:
        os.umask(before)
    with safe_open(tmp_path / "x.safetensors", framework="pt") as file:
        assert file.get_tensor("a").tolist() == [0, 1, 2] and file.metadata() == {"format": "pt"}
