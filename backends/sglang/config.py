"""Settings of the rollout engine sglang."""

from __future__ import annotations

from functools import cache
from typing import Any, Literal, Self

import attrs

from hybridflow.core.contracts.footprint import EngineLimits
from hybridflow.core.validators import at_least, fraction, positive
from hybridflow.kit.arguments import annotated_fields, known_arguments, package_folder
from hybridflow.kit.hosting.settings import ProcessConfig

OURS = frozenset({
    "model_path", "tokenizer_path", "skip_tokenizer_init", "load_format", "dtype", "device", "random_seed", "tp_size",
    "pp_size", "dp_size", "context_length", "max_running_requests", "max_total_tokens", "mem_fraction_static",
    "disable_radix_cache", "sampling_backend", "enable_memory_saver", "disable_cuda_graph",
})  # fmt: skip
"""Arguments that follow from the rest of the config."""


@cache
def argument_names() -> tuple[str, ...]:
    """The fields of the installed SGLang's ServerArgs, which it puts together from several files; () without it."""
    if (folder := package_folder("sglang")) is None:
        return ()
    parts = annotated_fields(sorted((folder / "srt" / "arg_groups" / "fields").glob("*.py")))
    return parts + annotated_fields([folder / "srt" / "server_args.py"], ["ServerArgs"])


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
    engine_args: dict[str, Any] = attrs.field(
        factory=dict, validator=known_arguments("SGLang", argument_names, OURS)
    )
    """Further arguments of SGLang's ServerArgs, checked against the names that the installed version has."""

    @property
    def own_process(self) -> bool:
        """Always: a scheduler of its own that fails takes the process that started it along."""
        return True

    def limits(self) -> EngineLimits:
        """What it takes of a device."""
        return EngineLimits(
            weight_bytes=4 if self.dtype == "float32" else 2,
            max_sequences=self.max_sequences,
            max_length=self.max_length or None,
            cache_tokens=self.kv_tokens or None,
            memory_share=None if self.kv_tokens else self.gpu_memory,
        )

    def one_of(self, engines: int) -> Self:
        return attrs.evolve(self, gpu_memory=min(self.gpu_memory, 0.5 / engines))
