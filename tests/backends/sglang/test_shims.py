"""The variables of SGLang's processes: shims for a CPU alone, and only those that the machine lacks."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from helpers.installed import UNDECLARED, needs, stand_in
from helpers.paths import matrix

from hybridflow.backends.sglang import shims
from hybridflow.backends.sglang.sampler import OURS
from hybridflow.core.names import is_installed

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
VISION, KERNEL = str(shims.FOLDER / "vision"), str(shims.FOLDER / "kernel")


def test_a_gpu_needs_no_shim_and_every_process_is_told_that_it_is_ours():
    found = shims.variables(CUDA)
    assert found == {OURS: "1", "HF_HUB_OFFLINE": "1"}
    on_cpu = shims.variables(CPU)
    assert found.items() <= on_cpu.items() and on_cpu["SGLANG_USE_CPU_ENGINE"] == "1"


@pytest.mark.skipif(is_installed("sgl_kernel"), reason="the real kernels are here")
def test_the_kernels_stand_in_makes_room_for_the_real_ones(tmp_path, monkeypatch):
    assert shims.variables(CPU)["PYTHONPATH"].split(os.pathsep) == [VISION, KERNEL]
    stand_in(tmp_path, "sgl_kernel", files={"sgl_kernel/__init__.py": ""})
    monkeypatch.syspath_prepend(str(tmp_path))
    assert shims.variables(CPU)["PYTHONPATH"] == VISION


def test_plugins_that_somebody_has_chosen_stay_and_ours_joins_them(monkeypatch):
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    assert "SGLANG_PLUGINS" not in shims.variables(CUDA)  # all of them are read then
    monkeypatch.setenv("SGLANG_PLUGINS", "timer,")
    assert shims.variables(CUDA)["SGLANG_PLUGINS"] == "timer,hybridflow"


def test_the_folders_are_there():
    assert os.path.isfile(f"{VISION}/sitecustomize.py") and os.path.isfile(
        f"{KERNEL}/sgl_kernel/__init__.py"
    )


@matrix
@needs("sglang", "torchvision")
@pytest.mark.parametrize(
    ("shim", "code"),
    [
        ("kernel", "import sglang.srt.entrypoints.engine"),
        ("vision", UNDECLARED + "import torchvision"),
    ],
)
def test_each_shim_is_still_needed(shim, code):
    """If the second half fails the packages have changed, and the shim can go."""
    environment = {**os.environ, **shims.variables(CPU)}
    paths = environment["PYTHONPATH"].split(os.pathsep)
    assert (
        subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True
        ).returncode
        == 0
    )
    environment["PYTHONPATH"] = os.pathsep.join(p for p in paths if p != str(shims.FOLDER / shim))
    without = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert (
        without.returncode != 0
        and ("sgl_kernel" if shim == "kernel" else "torchvision::nms") in without.stderr
    )
