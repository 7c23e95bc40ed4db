"""Settings of the rollout engine SGLang."""

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
from hybridflow.kit.huggingface.models import longest, windows_of

OURS = frozenset({
    "model_path", "tokenizer_path", "skip_tokenizer_init", "load_format", "dtype", "device",
    "random_seed", "tp_size", "pp_size", "dp_size", "context_length", "max_running_requests",
    "max_total_tokens", "mem_fraction_static", "disable_radix_cache", "sampling_backend",
    "enable_memory_saver", "disable_cuda_graph", "custom_weight_loader",
})  # fmt: skip
"""Arguments of SGLang that are set from the other settings; `engine_args` may not give them."""

OUTLIVE = frozenset({"hicache_storage_backend", "enable_lmcache"})
"""Arguments of further caches: on an update SGLang drops only the scheduler's own."""
CPU_CACHE_TOKENS = 65536
"""Size of the KV cache on a CPU where the settings give none, in tokens."""
GRAPHS_GB = 1.0
"""An allowance for CUDA graphs, which SGLang captures beside its share; not measured here."""
VOCABULARY_MULTIPLE = 64
"""SGLang pads embeddings and heads to a multiple of this many rows, over all tp ranks."""


NOT_HERE = {
    "bloom": "has no class that runs a bloom",
    "falcon": "has no class that runs a falcon",
    "phi": "leaves out the bias of the head of a phi",
}
"""Types of model -> why SGLang 0.5.23 cannot run them (docs/zoo.md)."""
NOT_ON_A_CPU = {
    "deepseek_v2": "has no latent attention on a CPU, as a deepseek_v2 has",
    "deepseek_v3": "has no latent attention on a CPU, as a deepseek_v3 has",
    "exaone4": "asks for an attention that no CPU has, for an exaone4",
    "gpt_oss": "asks for an attention that no CPU has, for a gpt_oss",
    "qwen2_moe": "asks for Triton, which no CPU has, for a qwen2_moe",
}
"""The same on a CPU."""
WITHOUT_WINDOWS = ("mistral", "phi3")
"""Types whose sliding windows SGLang 0.5.23 leaves out."""


def why_not(hf_config: Any, length: int, device: str) -> str | None:
    """Return why SGLang cannot run a model on a kind of device; None where it can, as is known.

    length: the most tokens of a sequence.
    """
    name = hf_config.model_type
    reasons = NOT_HERE | NOT_ON_A_CPU if device == "cpu" else NOT_HERE
    if name in reasons:
        return f"SGLang {reasons[name]}; take another engine"
    if name in WITHOUT_WINDOWS and windows_of(hf_config, length):
        return (
            f"SGLang leaves out the sliding windows of a {name}: it would attend to other tokens; "
            "take another engine, or sequences that fit into a window (rollout.max_length)"
        )
    config = hf_config.get_text_config()
    if device == "cpu" and getattr(config, "attn_logit_softcapping", None) is not None:
        return "SGLang on a CPU leaves out the cap of attention scores; take another engine"
    return None


@cache
def argument_names() -> tuple[str, ...]:
    """Return the fields of the installed SGLang's ServerArgs; () where it is not installed.

    They are read from the source, where the class is put together from several files.
    """
    folder = package_folder("sglang")
    if folder is None:
        return ()
    part_files = sorted((folder / "srt" / "arg_groups" / "fields").glob("*.py"))
    parts = annotated_fields(part_files)
    return parts + annotated_fields([folder / "srt" / "server_args.py"], ["ServerArgs"])


@attrs.frozen
class SGLangConfig(ProcessConfig):
    """SGLang runs in a process of its own, which starts further ones for its schedulers."""

    switches = {
        "max_sequences": (1024, 512, 256, 128),
        "gpu_memory": (0.3, 0.4, 0.6, 0.8, 0.9),
        "dtype": ("float32", "bfloat16"),
    }

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
    kv_tokens: int = attrs.field(default=0, validator=at_least(0))
    """Number of tokens that the KV cache has room for. 0 stands for what `gpu_memory` leaves on a
    GPU, and for 65536 on a CPU."""
    gpu_memory: float = attrs.field(default=0.4, validator=fraction)
    """Share of the GPU's memory for weights and KV cache; the trainer needs the rest."""

    # Speed
    prefix_cache: bool = True
    """Whether keys and values of a prefix that several prompts share are computed once
    (RadixAttention)."""
    eager: bool = True
    """Whether to run without CUDA graphs: the engine starts sooner and decodes more slowly."""

    engine_args: dict[str, Any] = attrs.field(
        factory=dict, validator=known_arguments("SGLang", argument_names, OURS, OUTLIVE)
    )
    """Further arguments of SGLang's ServerArgs. Their names are checked against those of the
    installed version."""

    @property
    def own_process(self) -> bool:
        """True, always: a scheduler of SGLang that fails kills the process that started it."""
        return True

    @classmethod
    def defaults_on(cls, device: str, hf_config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the defaults on CUDA: bfloat16, and CUDA graphs."""
        return {"dtype": "bfloat16", "eager": False} if device == "cuda" else {}

    def unsupported(self, hf_config: Any, generation: GenerationLayout, device: str) -> list[str]:
        """Return problems: models that SGLang does not have, or not on a CPU."""
        try:
            text = why_not(hf_config, longest(hf_config, self.max_length), device)
        except ModelError as error:
            text = str(error)
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
            cache_tokens=self.kv_tokens or (CPU_CACHE_TOKENS if device == "cpu" else None),
            memory_share=None if self.kv_tokens or device == "cpu" else self.gpu_memory,
            graphs_gb=0.0 if self.eager or device == "cpu" else GRAPHS_GB,
        )

    def within(self, room: EngineRoom) -> Self:
        """Return the settings with a share of at most the room's; `kv_tokens` stay as given."""
        if self.kv_tokens:
            return self
        return attrs.evolve(self, gpu_memory=min(self.gpu_memory, room.share / room.device))

    def planned_layout(
        self, shape: ModelShape, generation: GenerationLayout, dtype: torch.dtype
    ) -> WeightLayout:
        """Return the boxes that each rank of SGLang reads, for models with known shapes.

        In a run SGLang's own loader is traced instead. SGLang pads the vocabulary to a multiple of
        64; on a CPU it pads more, so that the first ranks read more than the last ones.
        """
        from hybridflow.kit.layouts import engine_layout

        multiple = max(VOCABULARY_MULTIPLE // generation.tp, 1)
        return engine_layout(shape, generation, shape.params(dtype), multiple)

    def one_of(self, engines: int) -> Self:
        """Return settings for each of `engines` engines on a device: at most half of it for all."""
        return attrs.evolve(self, gpu_memory=min(self.gpu_memory, 0.5 / engines))
