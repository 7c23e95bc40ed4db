"""What SGLang's processes need on a machine without a GPU, given to them by environment variables; nothing on a GPU.

Two packages that SGLang imports fail there: `sgl_kernel` is not published for CPUs, and the registry's torchvision is a
CUDA build whose operators do not load. Below cpu/ are a stand-in for the first, used where none is installed, and a fix for
the second, which does nothing where the operators are there.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import torch

from hybridflow.backends.sglang.sampler import OURS

FOLDER = Path(__file__).parent / "cpu"


def variables(device: torch.device) -> dict[str, str]:
    """Of the engine's process, and so of those that it starts."""
    plugins = [p for p in os.environ.get("SGLANG_PLUGINS", "").split(",") if p]
    found = {"SGLANG_PLUGINS": ",".join([*plugins, "hybridflow"])} if plugins else {}
    found |= {OURS: "1", "HF_HUB_OFFLINE": "1"}
    if device.type == "cpu":
        shims = [FOLDER / "vision", *([] if find_spec("sgl_kernel") else [FOLDER / "kernel"])]
        found |= {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": os.pathsep.join(map(str, shims))}
    return found
