"""Engines with a fault in them, as a stranger's plugin `faulty`, for whole runs."""

from __future__ import annotations

import os
from pathlib import Path

ENGINES = {
    "transformers": (
        "hybridflow.backends.transformers.engine:TransformersEngine",
        'tp=True, abort=True, continuous=True, weights_in_flight=True, process="either"',
    ),
    "vllm": (
        "hybridflow.backends.vllm.engine:VLLMEngine",
        'tp=True, abort=True, continuous=True, traced_layout=True, process="either"',
    ),
    "sglang": (
        "hybridflow.backends.sglang.engine:SGLangEngine",
        'tp=True, abort=True, continuous=True, weights_in_flight=True, traced_layout=True, process="own"',
    ),
}


def plant(folder: Path, engine: str, body: str) -> dict[str, str]:
    """Write a package with a subclass of our engine; the environment in which it is found.

    `body` are the methods of class Faulty, indented.
    """
    place, can = ENGINES[engine]
    module, _, name = place.partition(":")
    packages = folder / "packages"
    info = packages / "faulty-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[hybridflow]\nrollout_engine.faulty = faulty:Faulty\n")
    (packages / "faulty.py").write_text(
        "import attrs, numpy as np, torch\n"
        "from hybridflow.core.contracts.capabilities import EngineCapabilities\n"
        "from hybridflow.core.values.weights import Box\n"
        f"from {module} import {name}\n\n\n"
        f"class Faulty({name}):\n"
        f"    capabilities = EngineCapabilities({can})\n\n{body}"
    )
    found = [str(packages), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(found)}
