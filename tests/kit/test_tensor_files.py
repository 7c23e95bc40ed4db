"""Safetensors files have the mode of other new files."""

from __future__ import annotations

import errno
import os
import resource

import pytest
import torch
from safetensors import SafetensorError, safe_open

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


def test_what_the_system_refuses_is_its_error(tmp_path):
    """A file that is too large, by a limit of this process: a full disk comes the same way."""
    file = tmp_path / "x.safetensors"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(OSError, match="File too large") as said:
            write_tensors({"a": torch.zeros(10_000)}, file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert said.value.errno == errno.EFBIG and said.value.filename == str(file)


def test_another_error_stays_what_it_is(tmp_path, monkeypatch):
    def refuses(*args, **others):
        raise SafetensorError("Error while serializing: no such dtype")

    monkeypatch.setattr("safetensors.torch.save_file", refuses)
    with pytest.raises(SafetensorError, match="no such dtype"):
        write_tensors({"a": torch.zeros(2)}, tmp_path / "x.safetensors")
