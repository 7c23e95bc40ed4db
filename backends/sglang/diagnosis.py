"""Checks SGLang on this machine, for `hybridflow doctor`."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import entry_points

import torch

from hybridflow.backends.sglang.shims import FOLDER, variables
from hybridflow.kit.diagnosis import Row, has_gpu, import_row, installed

ON_GPU = "pip install 'hybridflow[sglang]'"
"""The line that installs SGLang on a machine with GPUs."""
ON_CPU = "pip install 'hybridflow[sglang-cpu]' && pip install --no-deps sglang==0.5.23"
"""The line for a machine without: SGLang's own pins bring builds for CUDA."""


def diagnose() -> Iterator[Row]:
    """Yield the rows of the report: package, sampler, shims, and two imports."""
    gpu = has_gpu()
    versions = installed(["sglang"])
    install_line = ON_GPU if gpu else ON_CPU
    if not versions:
        yield ("package", "not installed", install_line)
        return
    yield ("package", f"sglang {versions['sglang']}", "")

    # A checkout on the path, without its metadata, has no entry points.
    points = entry_points(group="sglang.srt.plugins")
    if not [point for point in points if point.name == "hybridflow"]:
        reinstall = "pip install --force-reinstall --no-deps hybridflow"
        yield ("sampler", "SGLang does not find ours (entry point sglang.srt.plugins)", reinstall)

    environment = variables(torch.device("cuda" if gpu else "cpu"))
    path = environment.get("PYTHONPATH", "")
    shims = [name for name in ("kernel", "vision") if str(FOLDER / name) in path]
    if shims:
        purpose = "(a CPU needs them; set for the engine's process alone)"
        yield ("shims", f"{', '.join(shims)} {purpose}", "")

    # The engine's module imports far more than the package does, kernels among them.
    yield import_row("sglang", environment, install_line)
    yield import_row("sglang.srt.entrypoints.engine", environment, install_line)
