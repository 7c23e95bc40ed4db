"""Settings of the rollout engine vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, Self

import attrs
import torch

from hybridflow.core.contracts.footprint import EngineLimits, EngineRoom
from hybridflow.core.errors import ModelError
from hybridflow.core.validators import at_least, fraction
from hybridflow.core.values.model_shape import ModelShape
from hybridflow.core.values.parallel import GenerationLayout
from hybridflow.core.values.weights import WeightLayout
from hybridflow.kit.arguments import annotated_fields, known_arguments, package_folder
from hybridflow.kit.hosting.settings import ProcessConfig
from hybridflow.kit.huggingface.models import head_size, longest
from hybridflow.kit.planned import AsksLoader, TracedRanks, ask_child

OURS = frozenset({
    "model", "tokenizer", "skip_tokenizer_init", "load_format", "dtype", "seed",
    "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size",
    "distributed_executor_backend", "max_model_len", "max_num_seqs", "kv_cache_memory_bytes",
    "gpu_memory_utilization", "enable_prefix_caching", "enable_sleep_mode", "logprobs_mode",
    "async_scheduling", "enforce_eager",
})  # fmt: skip
"""Arguments of vLLM that are set from the other settings; `engine_args` may not give them."""

OUTLIVE = frozenset({"kv_transfer_config"})
"""Arguments of connectors, which may ignore the request to drop cached keys and values."""
CPU_CACHE_GB = 1.0
"""Size of the KV cache on a CPU where the settings give none."""
GRAPHS_GB = 1.0
"""An allowance for CUDA graphs, which vLLM captures beside its share; not measured here."""
VOCABULARY_MULTIPLE = 64
"""vLLM pads embeddings and heads to a multiple of this many rows, over all tp ranks."""


HEADS_ON_A_CPU = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Sizes of an attention head that vLLM 0.32 takes on a CPU."""
NOT_ON_A_CPU = {
    "gpt_oss": "has on a CPU no experts as those",
    "phi": "has no bias of the head as that",
}
"""Types of model -> what vLLM 0.32 lacks for them (docs/zoo.md)."""


def why_not_on_a_cpu(hf_config: Any) -> str | None:
    """Return why vLLM cannot run a model on a CPU; None where it can, as far as is known."""
    name = hf_config.model_type
    if name in NOT_ON_A_CPU:
        return f"vLLM {NOT_ON_A_CPU[name]} of a {name}; take another engine"
    config = hf_config.get_text_config()
    if getattr(config, "kv_lora_rank", None) is None:
        size = head_size(hf_config)
        if size not in HEADS_ON_A_CPU:
            known = ", ".join(map(str, HEADS_ON_A_CPU))
            return (
                f"vLLM on a CPU takes attention heads of {known}, and the model's are of {size}; "
                "choose num_attention_heads or head_dim for one of them, or another engine"
            )
        return None

    # Its kernel treats the rotated part of a query as a tensor of its own. Scaled rotations (yarn,
    # as all published models of this kind have) are computed by other code.
    rotation = getattr(config, "rope_parameters", None) or {}
    if rotation.get("rope_type", "default") == "default":
        return (
            f"vLLM on a CPU computes other positions for a {config.model_type} without "
            "rope scaling; take another engine"
        )
    return None


@cache
def argument_names() -> tuple[str, ...]:
    """Return the fields of the installed vLLM's EngineArgs; () where it is not installed."""
    folder = package_folder("vllm")
    if folder is None:
        return ()
    return annotated_fields([folder / "engine" / "arg_utils.py"], ["EngineArgs"])


@attrs.frozen
class VLLMConfig(ProcessConfig, AsksLoader):
    """vLLM runs in the worker's own process, or in a child of it."""

    switches = {
        "max_sequences": (1024, 512, 256, 128),
        "gpu_memory": (0.3, 0.4, 0.6, 0.8, 0.9),
        "dtype": ("float32", "bfloat16"),
    }

    own_process: bool = False
    """Run the engine in a child of the worker's process. If it crashes, the worker survives. Not
    with tensor parallelism."""

    # The model
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of weights, activations and KV cache."""

    # Sizes
    max_sequences: int = attrs.field(default=256, validator=at_least(1))
    """Largest number of sequences decoded at once; further ones wait."""
    max_length: int = attrs.field(default=0, validator=at_least(0))
    """Largest number of tokens of a prompt with its response. 0 stands for the model's own limit
    (max_position_embeddings) on a CPU, and on a GPU for the longest prompt and response of the
    run."""
    kv_memory_gb: float = attrs.field(default=0.0, validator=at_least(0))
    """Size of the KV cache in GB (10^9 bytes). 0 stands for what `gpu_memory` leaves on a GPU, and
    for 1 GB on a CPU."""
    gpu_memory: float = attrs.field(default=0.4, validator=fraction)
    """Share of the GPU's memory for weights and KV cache; the trainer needs the rest."""

    # Speed
    prefix_cache: bool = True
    """Whether keys and values of a prefix that several prompts share are computed once."""
    eager: bool = True
    """Whether to run without CUDA graphs: the engine starts sooner and decodes more slowly."""

    engine_args: dict[str, Any] = attrs.field(
        factory=dict, validator=known_arguments("vLLM", argument_names, OURS, OUTLIVE)
    )
    """Further arguments of vLLM's EngineArgs. Their names are checked against those of the
    installed version."""

    @classmethod
    def defaults_on(cls, device: str, hf_config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the defaults on CUDA: bfloat16, and CUDA graphs."""
        return {"dtype": "bfloat16", "eager": False} if device == "cuda" else {}

    def unsupported(self, hf_config: Any, generation: GenerationLayout, device: str) -> list[str]:
        """Return problems: models that vLLM does not have on a CPU."""
        try:
            longest(hf_config, self.max_length)
        except ModelError as error:
            return [str(error)]
        text = why_not_on_a_cpu(hf_config) if device == "cpu" else None
        return [] if text is None else [text]

    def up_to(self, tokens: int) -> Self:
        """Return the settings with a max_length of `tokens`, unless one is given."""
        return attrs.evolve(self, max_length=self.max_length or tokens)

    def limits(self, device: str = "cuda") -> EngineLimits:
        """Return the engine's weight type and limits, for estimates of memory and time."""
        return EngineLimits(
            weight_bytes=4 if self.dtype == "float32" else 2,
            max_sequences=self.max_sequences,
            max_length=self.max_length or None,
            eager=bool(self.eager),
            cache_gb=self.kv_memory_gb or (CPU_CACHE_GB if device == "cpu" else None),
            memory_share=None if self.kv_memory_gb or device == "cpu" else self.gpu_memory,
            graphs_gb=0.0 if self.eager or device == "cpu" else GRAPHS_GB,
        )

    def within(self, room: EngineRoom) -> Self:
        """Return the settings with a memory share, or a cache, of at most that of `room`."""
        if self.kv_memory_gb:
            return attrs.evolve(self, kv_memory_gb=min(self.kv_memory_gb, room.cache / 1e9))
        return attrs.evolve(self, gpu_memory=min(self.gpu_memory, room.share / room.device))

    def planned_layout(
        self, shape: ModelShape, generation: GenerationLayout, dtype: torch.dtype
    ) -> WeightLayout:
        """Return the boxes that each rank of vLLM reads, for models with known shapes.

        In a run vLLM's own loader is traced instead, as in `traced`. vLLM pads the vocabulary to a
        multiple of 64.
        """
        from hybridflow.kit.layouts import engine_layout

        multiple = max(VOCABULARY_MULTIPLE // generation.tp, 1)
        return engine_layout(shape, generation, shape.params(dtype), multiple)

    def loader_missing(self) -> str | None:
        """Return a text if vLLM is not installed, else None."""
        return "vLLM is not installed" if package_folder("vllm") is None else None

    def traced(self, fields: Mapping[str, Any], tp: int, dtype: torch.dtype) -> TracedRanks:
        """Return the boxes that each tp rank of vLLM's loader reads, traced in a child process.

        Raises ModelError for a model that vLLM does not support.
        """
        arguments = dict(self.engine_args)
        if self.max_length:
            arguments["max_model_len"] = self.max_length
        request = {
            "fields": fields,
            "tp": tp,
            "dtype": str(dtype).removeprefix("torch."),
            "arguments": arguments,
        }
        return ask_child("hybridflow.backends.vllm.planned", "vLLM", request)

    def one_of(self, engines: int) -> Self:
        """Return settings for each of `engines` engines on a device: at most half of it for all."""
        return attrs.evolve(self, gpu_memory=min(self.gpu_memory, 0.5 / engines))
