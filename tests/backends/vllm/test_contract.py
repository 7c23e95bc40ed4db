"""vLLM's source has what our engine touches, also in the code for CUDA, which no test here runs."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

from helpers.installed import needs
from helpers.paths import script

RUNNER = "v1/worker/gpu_model_runner.py"
contract = script("contract")
PINNING = """
from vllm.config import VllmConfig
from hybridflow.backends.vllm.patches import pin_the_runner

class Plain:
    watermark_config = None
    class attention_config:
        hisparse_config = None

takes_v2 = VllmConfig.use_v2_model_runner.fget
print(takes_v2(Plain))
pin_the_runner()
print(takes_v2(Plain))
"""


@needs("vllm")
def test_the_installed_version_has_all_of_it():
    assert list(contract.missing(contract.installed())) == []
    # What makes the check see anything
    assert {"sampler", "input_batch", "requests"} <= contract.of_the_runner()
    assert (
        "model_executor.model_loader.reload.layerwise",
        "materialize_layer",
    ) in contract.imported()


@needs("vllm")
def test_the_worker_for_cuda_takes_this_runner_where_the_variable_says_so():
    # In a process of its own: once an engine has started, vLLM does not look at variables again.
    asked = {**os.environ, "VLLM_USE_V2_MODEL_RUNNER": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PINNING], env=asked, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-2:] == ["True", "False"]

    worker = ast.parse((contract.installed() / "v1/worker/gpu_worker.py").read_text())
    [make] = [
        node
        for node in ast.walk(worker)
        if isinstance(node, ast.FunctionDef) and node.name == "_make_model_runner"
    ]
    branch, imported, made = [part for part in make.body if not isinstance(part, ast.Expr)]
    assert ast.unparse(branch.test) == "self.use_v2_model_runner"
    module, _ = RUNNER.replace("/", ".").rsplit(".", 1)
    assert ast.unparse(imported) == f"from vllm.{module} import GPUModelRunner as GPUModelRunnerV1"
    assert ast.unparse(made) == "return GPUModelRunnerV1(self.vllm_config, self.device)"


def copied(folder: Path, path: str, text: str | None = None) -> Path:
    """Copy the installed source, with one file changed; of the rest only what the contract reads."""
    source = contract.installed()
    package = folder / "vllm"
    ignore = shutil.ignore_patterns("*.so", "__pycache__", "models", "kernels", "third_party")
    shutil.copytree(source, package, ignore=ignore)
    if text is not None:
        (package / path).write_text(text)
    return package


@needs("vllm")
def test_a_version_without_what_we_touch_is_told_of(tmp_path):
    source = contract.installed()
    renamed = (source / RUNNER).read_text().replace("self.sampler", "self.sampling")
    package = copied(tmp_path, RUNNER, renamed)
    assert list(contract.missing(package)) == [f"GPUModelRunner in {RUNNER} has no sampler"]

    # vLLM's other runner, which it takes on CUDA by itself
    other = (source / "v1/worker/gpu/model_runner.py").read_text()
    (package / RUNNER).write_text(other)
    said = list(contract.missing(package))
    assert f"GPUModelRunner in {RUNNER} has no input_batch" in said

    (package / RUNNER).unlink()
    layerwise = package / "model_executor/model_loader/reload/layerwise.py"
    layerwise.write_text(layerwise.read_text().replace("materialize_layer", "make_layer"))
    told = list(contract.missing(package))
    assert "vllm.model_executor.model_loader.reload.layerwise has no materialize_layer" in told
    assert f"GPUModelRunner in {RUNNER} has no requests" in told
