"""What our vLLM engine touches in vLLM's source, and whether a version of vLLM has it: `python ci/contract.py [FOLDER]`.

Read from source alone, so it needs no GPU: FOLDER holds the package `vllm`, such as an unpacked wheel for CUDA; by default it
is the installed one. Imports and attributes of imported modules are collected from backends/vllm, and so are the attributes of
the model runner; what those objects lead to is the table below. Exits 1 with a line for each name that is not there.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

OURS = Path(__file__).parents[1] / "backends" / "vllm"
RUNNER = ("v1/worker/gpu_model_runner.py", "GPUModelRunner")
"""What the worker for CUDA makes where VLLM_USE_V2_MODEL_RUNNER is 0."""
RUNNERS = ("runner", "_runner")
"""Our names of it."""
LED_TO = {
    ("v1/worker/gpu_worker.py", "Worker"): ("model_runner", "use_v2_model_runner"),
    ("v1/worker/worker_base.py", "WorkerWrapperBase"): ("worker",),
    ("v1/executor/uniproc_executor.py", "UniProcExecutor"): ("driver_worker", "shutdown"),
    ("v1/engine/llm_engine.py", "LLMEngine"): (
        "model_executor", "vllm_config", "engine_core", "output_processor",
        "add_request", "step", "abort_request", "reset_prefix_cache",
    ),
    ("v1/engine/core_client.py", "InprocClient"): ("engine_core",),
    ("v1/engine/core.py", "EngineCore"): ("model_executor",),
    ("v1/engine/output_processor.py", "OutputProcessor"): ("request_states",),
    ("v1/engine/output_processor.py", "RequestState"): ("detokenizer", "logprobs_processor"),
    ("v1/engine/detokenizer.py", "IncrementalDetokenizer"): ("output_token_ids",),
    ("v1/engine/logprobs.py", "LogprobsProcessor"): ("logprobs",),
    ("v1/worker/gpu_input_batch.py", "InputBatch"): ("req_ids",),
    ("v1/worker/gpu_input_batch.py", "CachedRequestState"): ("output_token_ids",),
    ("v1/sample/sampler.py", "Sampler"): ("topk_topp_sampler", "forward", "compute_logprobs"),
    ("v1/sample/metadata.py", "SamplingMetadata"): ("generators", "temperature"),
    ("entrypoints/llm.py", "LLM"): ("llm_engine", "sleep", "wake_up"),
}  # fmt: skip
"""(file, class) -> attributes that we reach through the engine."""


def missing(package: Path) -> Iterator[str]:
    """Yield a sentence for each name that this package `vllm` does not have."""
    for module, name in sorted(imported()):
        if (file := file_of(package, module)) is None:
            yield f"there is no vllm.{module}"
        elif name not in defined(file) and file_of(package, f"{module}.{name}") is None:
            yield f"vllm.{module} has no {name}"
    for (path, cls), names in {RUNNER: sorted(of_the_runner()), **LED_TO}.items():
        file = package / path
        held = attributes(package, file, cls) if file.exists() else set()
        for name in names:
            if name not in held:
                yield f"{cls} in {path} has no {name}"


def imported() -> set[tuple[str, str]]:
    """Return (module without "vllm.", name) of all that our modules import, or read of imported modules."""
    found = set()
    for tree in trees():
        modules: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm"):
                module = (node.module or "").removeprefix("vllm").removeprefix(".")
                for alias in node.names:
                    found.add((module, alias.name))
                    modules[alias.asname or alias.name] = f"{module}.{alias.name}"
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                module = modules.get(node.value.id, "")
                # Names of modules are in lower case, and those of classes are not.
                if module and node.value.id.islower():
                    found.add((module, node.attr))
    return found


def of_the_runner() -> set[str]:
    """Return the attributes of the model runner that our modules read or set."""
    found = set()
    for tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                owner = node.value
                name = owner.id if isinstance(owner, ast.Name) else getattr(owner, "attr", None)
                if name in RUNNERS:
                    found.add(node.attr)
    return found


def trees() -> list[ast.Module]:
    return [ast.parse(path.read_text()) for path in sorted(OURS.glob("*.py"))]


def file_of(package: Path, module: str) -> Path | None:
    """Return the file of a module of the package."""
    path = package.joinpath(*module.split(".")) if module else package
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.exists():
            return file
    return None


def defined(file: Path) -> set[str]:
    """Return the names that a module's source gives at its top, also those that it loads when they are asked for."""
    names = set()
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
            if isinstance(node, ast.ImportFrom) and node.level == 1 and "*" in names:
                names |= defined(file.parent / f"{node.module}.py")
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)  # a table of lazy imports, as in vllm/__init__.py
    return names


def attributes(package: Path, file: Path, cls: str) -> set[str]:
    """Return what a class's source defines or sets on itself, its bases in the package included."""
    tree = ast.parse(file.read_text())
    origins = {
        alias.asname or alias.name: (node.module, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm.")
        for alias in node.names
    }
    found = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == cls]
    names: set[str] = set()
    for node in found:
        for base in node.bases:
            base_name = getattr(base, "id", None)
            if base_name in origins:
                module, original = origins[base_name]
                if (there := file_of(package, module.removeprefix("vllm."))) is not None:
                    names |= attributes(package, there, original)
            elif base_name and base_name != cls:
                names |= attributes(package, file, base_name)
        for part in ast.walk(node):
            if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
                names.add(part.name)
            elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                names.add(part.target.id)
            elif isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store):
                names |= {part.attr} if ast.unparse(part.value) == "self" else set()
    return names


def installed() -> Path:
    """Return the folder of the installed package."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise SystemExit("vllm is not installed here; give the folder of an unpacked wheel")
    return Path(spec.origin).parent


if __name__ == "__main__":
    package = Path(sys.argv[1]) / "vllm" if len(sys.argv) > 1 else installed()
    problems = list(missing(package))
    print("\n".join(problems) or f"{package} has all that backends/vllm touches")
    raise SystemExit(bool(problems))
