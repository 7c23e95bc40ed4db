"""What `hybridflow doctor` says of SGLang on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import entry_points

import torch

from hybridflow.backends.sglang.shims import FOLDER, variables
from hybridflow.kit.diagnosis import Row, has_gpu, import_row, installed

ON_GPU = "pip install 'hybridflow[sglang]'"
ON_CPU = "pip install 'hybridflow[sglang-cpu]' && pip install --no-deps sglang==0.5.23"


def diagnose() -> Iterator[Row]:
    gpu, found = has_gpu(), installed(["sglang"])
    line = ON_GPU if gpu else ON_CPU
    if not found:
        yield ("package", "not installed", line)
        return
    yield ("package", f"sglang {found['sglang']}", "")
    if not [e for e in entry_points(group="sglang.srt.plugins") if e.name == "hybridflow"]:
        reinstall = "pip install --force-reinstall --no-deps hybridflow"
        yield ("sampler", "SGLang does not find ours (entry point sglang.srt.plugins)", reinstall)
    environment = variables(torch.device("cuda" if gpu else "cpu"))
    used = [
        name
        for name in ("kernel", "vision")
        if str(FOLDER / name) in environment.get("PYTHONPATH", "")
    ]
    if used:
        yield (
            "shims",
            f"{', '.join(used)} (a CPU needs them; set for the engine's process alone)",
            "",
        )
    yield import_row("sglang", environment, line)
    yield import_row("sglang.srt.entrypoints.engine", environment, line)
