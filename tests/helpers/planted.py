"""Engines and trainers with a fault in them, as a stranger's plugin `faulty`, for whole runs."""

from __future__ import annotations

import os
from pathlib import Path

OURS = {
    "transformers": (
        "hybridflow.backends.transformers.engine:TransformersEngine",
        'EngineCapabilities(tp=True, process="either")',
    ),
    "vllm": (
        "hybridflow.backends.vllm.engine:VLLMEngine",
        'EngineCapabilities(tp=True, process="either")',
    ),
    "sglang": (
        "hybridflow.backends.sglang.engine:SGLangEngine",
        'EngineCapabilities(tp=True, process="own")',
    ),
    "fsdp": (
        "hybridflow.backends.fsdp.backend:FSDPBackend",
        'TrainingCapabilities(axes=("dp", "tp"))',
    ),
}


def plant(folder: Path, ours: str, body: str) -> dict[str, str]:
    """Write a package with a subclass of our engine or backend; the environment in which it is found.

    `body` are the methods of class Faulty, indented.
    """
    place, can = OURS[ours]
    kind = "training_backend" if ours == "fsdp" else "rollout_engine"
    module, _, name = place.partition(":")
    packages = folder / "packages"
    info = packages / "faulty-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[hybridflow]\n{kind}.faulty = faulty:Faulty\n")
    (packages / "faulty.py").write_text(
        "import attrs, numpy as np, torch\n"
        "from hybridflow.core.contracts.capabilities import EngineCapabilities, TrainingCapabilities\n"
        "from hybridflow.core.values.weights import Box\n"
        f"from {module} import {name}\n\n\n"
        f"class Faulty({name}):\n"
        f"    capabilities = {can}\n\n{body}"
    )
    found = [str(packages), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(found)}
