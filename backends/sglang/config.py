"""Settings of the rollout engine sglang."""

from __future__ import annotations

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import attrs

from hybridflow.core.config.validators import at_least, fraction, positive
from hybridflow.core.names import did_you_mean
from hybridflow.core.serving.config import ProcessConfig

OURS = frozenset({
    "model_path", "tokenizer_path", "skip_tokenizer_init", "load_format", "dtype", "device", "random_seed", "tp_size",
    "pp_size", "dp_size", "context_length", "max_running_requests", "max_total_tokens", "mem_fraction_static",
    "disable_radix_cache", "sampling_backend", "enable_memory_saver", "disable_cuda_graph",
})  # fmt: skip
"""Arguments that follow from the rest of the config."""


@cache
def argument_names() -> tuple[str, ...]:
    """The fields of the installed SGLang's ServerArgs, read without importing it; () where it is not installed."""
    spec = find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        return ()
    folder = Path(spec.submodule_search_locations[0]) / "srt"
    files = [*sorted((folder / "arg_groups" / "fields").glob("*.py")), folder / "server_args.py"]
    found: dict[str, None] = {}
    for file in files:
        if not file.is_file():
            continue
        in_fields = file.parent.name == "fields"
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef) and (in_fields or node.name == "ServerArgs"):
                targets = (n.target for n in node.body if isinstance(n, ast.AnnAssign))
                found |= dict.fromkeys(t.id for t in targets if isinstance(t, ast.Name))
    return tuple(found)


def _known(_: Any, field: attrs.Attribute, value: dict[str, Any]) -> None:
    for name in value:
        if name in OURS:
            raise ValueError(f"{field.name}: {name} follows from the rest of the config; remove it")
        if (names := argument_names()) and name not in names:
            raise ValueError(f"{field.name}: the installed SGLang has no argument {name!r}{did_you_mean(name, names)}")


@attrs.frozen
class SGLangConfig(ProcessConfig):
    """The engine of SGLang, in a process of its own, which starts further ones for its schedulers."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of weights, activations and KV cache."""
    max_sequences: int = attrs.field(default=256, validator=at_least(1))
    """Sequences decoded at once; others wait."""
    max_length: int = attrs.field(default=0, validator=at_least(0))
    """Tokens of a prompt with its response; 0: as many as the model has positions for."""
    kv_tokens: int = attrs.field(default=0, validator=at_least(0))
    """Tokens that the KV cache has room for; 0: on a GPU what `gpu_memory` leaves, on a CPU 65536."""
    gpu_memory: float = attrs.field(default=0.4, validator=fraction)
    """The share of the GPU's memory for weights and cache; the trainer needs the rest."""
    prefix_cache: bool = True
    """Compute the key and value of a beginning that several prompts share once (RadixAttention)."""
    eager: bool = True
    """No CUDA graphs: quicker to start, slower to decode."""
    weights: Literal["bucket", "group"] = "bucket"
    """How the engine's process hands weights to its schedulers: "bucket": in buckets of shared memory (CUDA IPC on a GPU);
    "group": by broadcast in a process group (gloo, NCCL), which needs no memory that both see."""
    bucket_mb: float = attrs.field(default=256.0, validator=positive)
    """Size of such a bucket, in 10^6 bytes."""
    engine_args: dict[str, Any] = attrs.field(factory=dict, validator=_known)
    """Further arguments of SGLang's ServerArgs, checked against the names that the installed version has."""
