"""Environment variables of SGLang's processes; on a machine without a GPU they install two shims.

Two packages that SGLang imports fail without a GPU:

    package      why it fails                                     shim, in cpu/
    sgl_kernel   not published for CPUs                           kernel: a stand-in
    torchvision  the registry's build is for CUDA, and its        vision: declares the operators
                 operators do not load

The stand-in is used only where no sgl_kernel is installed. The other shim does nothing where the
operators have loaded.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import torch

from hybridflow.backends.sglang.sampler import OURS

FOLDER = Path(__file__).parent / "cpu"
"""The folder with a subfolder for each shim, which is added to the path of SGLang's processes."""


def variables(device: torch.device) -> dict[str, str]:
    """Return the variables of the engine's process, which those that it starts inherit."""
    environment: dict[str, str] = {}

    # SGLang loads every plugin unless SGLANG_PLUGINS names some; then it must name ours too.
    plugins = [name for name in os.environ.get("SGLANG_PLUGINS", "").split(",") if name]
    if plugins:
        environment["SGLANG_PLUGINS"] = ",".join([*plugins, "hybridflow"])

    environment |= {OURS: "1", "HF_HUB_OFFLINE": "1"}
    if device.type == "cpu":
        shims = [FOLDER / "vision"]
        if not find_spec("sgl_kernel"):
            shims.append(FOLDER / "kernel")
        environment["SGLANG_USE_CPU_ENGINE"] = "1"
        environment["PYTHONPATH"] = os.pathsep.join(map(str, shims))
    return environment
