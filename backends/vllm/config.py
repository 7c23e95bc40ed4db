"""Settings of the rollout engine vllm."""

from __future__ import annotations

from functools import cache
from typing import Any, Literal, Self

import attrs

from hybridflow.core.contracts.footprint import EngineLimits
from hybridflow.core.validators import at_least, fraction
from hybridflow.kit.arguments import annotated_fields, known_arguments, package_folder
from hybridflow.kit.hosting.settings import ProcessConfig

OURS = frozenset({
    "model", "tokenizer", "skip_tokenizer_init", "load_format", "dtype", "seed", "tensor_parallel_size",
    "pipeline_parallel_size", "data_parallel_size", "distributed_executor_backend", "max_model_len", "max_num_seqs",
    "kv_cache_memory_bytes", "gpu_memory_utilization", "enable_prefix_caching", "enable_sleep_mode", "logprobs_mode",
    "async_scheduling", "enforce_eager",
})  # fmt: skip
"""Arguments that follow from the rest of the config."""


@cache
def argument_names() -> tuple[str, ...]:
    """The fields of the installed vLLM's EngineArgs; () where it is not installed."""
    folder = package_folder("vllm")
    return annotated_fields([folder / "engine" / "arg_utils.py"], ["EngineArgs"]) if folder else ()


@attrs.frozen
class VLLMConfig(ProcessConfig):
    """The engine of vLLM, in the worker's own process, or in one of its own."""

    own_process: bool = False
    """Run in a child of the worker's process, whose crash does not take the worker with it; without tensor parallelism."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of weights, activations and KV cache."""
    max_sequences: int = attrs.field(default=256, validator=at_least(1))
    """Sequences decoded at once; others wait."""
    max_length: int = attrs.field(default=0, validator=at_least(0))
    """Tokens of a prompt with its response; 0: as many as the model has positions for."""
    kv_memory_gb: float = attrs.field(default=0.0, validator=at_least(0))
    """The KV cache, in 10^9 bytes. 0: on a GPU what `gpu_memory` leaves, on a CPU 1."""
    gpu_memory: float = attrs.field(default=0.4, validator=fraction)
    """The share of the GPU's memory for weights and cache; the trainer needs the rest."""
    prefix_cache: bool = True
    """Compute the key and value of a beginning that several prompts share once."""
    eager: bool = True
    """No CUDA graphs: quicker to start, slower to decode."""
    engine_args: dict[str, Any] = attrs.field(
        factory=dict, validator=known_arguments("vLLM", argument_names, OURS)
    )
    """Further arguments of vLLM's EngineArgs, checked against the names that the installed version has."""

    def limits(self) -> EngineLimits:
        """What it takes of a device."""
        return EngineLimits(
            weight_bytes=4 if self.dtype == "float32" else 2,
            max_sequences=self.max_sequences,
            max_length=self.max_length or None,
            cache_gb=self.kv_memory_gb or None,
            memory_share=None if self.kv_memory_gb else self.gpu_memory,
        )

    def one_of(self, engines: int) -> Self:
        return attrs.evolve(self, gpu_memory=min(self.gpu_memory, 0.5 / engines))
