"""Settings of the embedded rollout engine."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, Self

import attrs
import torch

from hybridflow.core.contracts.footprint import EngineLimits, EngineRoom
from hybridflow.core.values.model_shape import ModelShape
from hybridflow.core.values.parallel import GenerationLayout
from hybridflow.core.values.weights import WeightLayout
from hybridflow.kit.hosting.settings import ProcessConfig
from hybridflow.kit.layouts import engine_layout

CPU_CACHE_GB = 4.0
"""Limit of the KV cache on a CPU where the settings give none."""
LANE = 64
"""The capacity of a lane, and n for fused attention kernels, are multiples of this."""
MAX_BURST = 64
"""Largest number of tokens that are decoded between two checks for finished sequences."""
LOGIT_COPIES = 4.0
"""Copies of the logits during sampling: the logits, log-softmax, probabilities and sums."""
FUSED = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
"""Prefixes of the names of parameters whose rows are reordered into one storage."""


def _one_of(*allowed: str):
    """Return a validator that raises ValueError for any other value."""

    def check(_, field, value):
        if value not in allowed:
            raise ValueError(
                f"{field.name} is {value!r}; it must be one of {', '.join(map(repr, allowed))}"
            )

    return check


def _not_negative(_, field, value):
    """Raise ValueError for a negative value, where 0 means automatic."""
    if value < 0:
        raise ValueError(f"{field.name} is {value}; it must be 0 (automatic) or more")


@attrs.frozen
class TransformersEngineConfig(ProcessConfig):
    """The embedded engine generates inside the worker process, on CPU or on a GPU."""

    switches = {"max_sequences": (1024, 512, 256, 128), "dtype": ("float32", "bfloat16")}

    own_process: bool = False
    """Run the engine in a child of the worker's process instead. If it crashes, the worker
    survives."""

    max_sequences: int = attrs.field(default=0, validator=_not_negative)
    """Largest number of sequences decoded at once (slots); further ones wait. 0 stands for 256, or
    for as many as fit into `kv_memory_gb` if that is less."""
    dtype: str = attrs.field(default="float32", validator=_one_of("float32", "bfloat16"))
    """Type of weights, activations and KV cache: "float32" or "bfloat16". Probabilities are always
    computed in float32."""
    fast: bool | None = None
    """True: our own decoder (llama, qwen2, qwen3, mistral), or an error where the model does not
    fit it. False: the model's own Hugging Face code, which is slower and runs any causal model.
    None: ours where the model fits."""
    prefill_tokens: int = attrs.field(default=8192, validator=attrs.validators.gt(0))
    """Largest number of prompt tokens in one prefill pass, padding included. A single longer prompt
    has a pass of its own."""
    kv_memory_gb: float = attrs.field(default=0.0, validator=_not_negative)
    """Limit of the KV cache in GB (10^9 bytes). 0 stands for 70% of the free memory of a GPU, or 4
    GB on CPU."""
    sync_every: int = attrs.field(default=0, validator=_not_negative)
    """Number of tokens decoded between two checks for finished sequences. 0 stands for 16 on a GPU,
    where each check waits for the device, and for 1 on CPU (more while no sequence can stop before
    its length limit)."""

    @classmethod
    def defaults_on(cls, device: str, hf_config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the defaults on CUDA: bfloat16."""
        return {"dtype": "bfloat16"} if device == "cuda" else {}

    def unsupported(self, hf_config: Any, generation: GenerationLayout, device: str) -> list[str]:
        """Return problems: a model that the decoder does not have, or that cannot be cut."""
        from hybridflow.backends.transformers.fit import why_not

        text = why_not(hf_config, self.fast, generation)
        return [] if text is None else [text]

    @property
    def torch_allocates(self) -> bool:
        """True where the engine runs in the worker's process."""
        return not self.own_process

    @property
    def varies(self) -> str:
        """Say what varies: a process that torch's algorithms are not set in, or a cache's size.

        Which sequences are computed together depends on the size.
        """
        if self.own_process:
            return "its own process is not told to be deterministic; set own_process = false"
        if not self.kv_memory_gb:
            return "its cache is as large as free memory allows; set kv_memory_gb"
        return ""

    def limits(self, device: str = "cuda") -> EngineLimits:
        """Return the engine's weight type and limits, for estimates of memory and time."""
        automatic = CPU_CACHE_GB if device == "cpu" else None
        return EngineLimits(
            weight_bytes=4 if self.dtype == "float32" else 2,
            max_sequences=self.max_sequences or 256,
            cache_gb=self.kv_memory_gb or automatic,
            grows=True,
            stays=device == "cpu",
            prefill_tokens=self.prefill_tokens,
            logit_copies=LOGIT_COPIES,
            block_tokens=LANE,
            spare_tokens=0 if device == "cpu" and not self.sync_every else MAX_BURST,
        )

    def lent_params(self, shape: ModelShape, device: str) -> int:
        """Return the number of parameters with the memory order of the trainer's storage.

        Fused queries, keys and values are not, and in float32 on a CPU no matrix of a layer is.
        """
        transposed = device == "cpu" and self.dtype == "float32"
        own = [
            size
            for name, size in shape.layer.items()
            if not (name.startswith(FUSED) or (transposed and name.endswith("proj.weight")))
        ]
        outside = (*shape.before.values(), *shape.after.values())
        return shape.layers * sum(map(prod, own)) + sum(map(prod, outside))

    def within(self, room: EngineRoom) -> Self:
        """Return the settings with a cache of at most `room.cache` bytes."""
        gigabytes = room.cache / 1e9
        if self.kv_memory_gb:
            gigabytes = min(gigabytes, self.kv_memory_gb)
        return attrs.evolve(self, kv_memory_gb=gigabytes)

    def planned_layout(
        self, shape: ModelShape, generation: GenerationLayout, dtype: torch.dtype
    ) -> WeightLayout:
        """Return the boxes that `TransformersEngine.layout` will have, from the shapes alone."""
        return engine_layout(shape, generation, shape.params(dtype))
