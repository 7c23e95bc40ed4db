"""Settings of the embedded rollout engine."""

from __future__ import annotations

import attrs
import torch

from hybridflow.core.contracts.footprint import EngineLimits
from hybridflow.core.values.model_shape import ModelShape
from hybridflow.core.values.parallel import GenerationLayout
from hybridflow.core.values.weights import WeightLayout
from hybridflow.kit.hosting.settings import ProcessConfig
from hybridflow.kit.layouts import engine_layout


def _one_of(*allowed: str):
    def check(_, field, value):
        if value not in allowed:
            raise ValueError(
                f"{field.name} is {value!r}; it must be one of {', '.join(map(repr, allowed))}"
            )

    return check


def _not_negative(_, field, value):
    if value < 0:
        raise ValueError(f"{field.name} is {value}; it must be 0 (automatic) or more")


@attrs.frozen
class TransformersEngineConfig(ProcessConfig):
    """The embedded engine: generates inside the worker process, on CPU or on one GPU."""

    own_process: bool = False
    """Run in a child of the worker's process instead, whose crash does not take the worker with it."""

    max_sequences: int = attrs.field(default=0, validator=_not_negative)
    """Sequences decoded at once (slots); others wait. 0: 256, or what fits into `kv_memory_gb`."""
    dtype: str = attrs.field(default="float32", validator=_one_of("float32", "bfloat16"))
    """Type of weights, activations and KV cache: "float32" or "bfloat16". Probabilities are float32 always."""
    fast: bool | None = None
    """True: our decoder (llama, qwen2, qwen3, mistral), or an error where the model does not fit it. False: the
    model's own Hugging Face code, slower and for any causal model. None: ours where it fits."""
    prefill_tokens: int = attrs.field(default=8192, validator=attrs.validators.gt(0))
    """Prompt tokens of one prefill pass, padding included; at least one prompt is always taken."""
    kv_memory_gb: float = attrs.field(default=0.0, validator=_not_negative)
    """Limit of the KV cache in GB (10^9 bytes). 0: 70% of what is free on a GPU, 4 GB on CPU."""
    sync_every: int = attrs.field(default=0, validator=_not_negative)
    """Tokens decoded between looks at what has finished. 0: 16 on a GPU, where each look waits for the device, and 1
    on CPU (more while no sequence can stop before its length limit)."""

    def limits(self) -> EngineLimits:
        """What it takes of a device."""
        return EngineLimits(
            weight_bytes=4 if self.dtype == "float32" else 2,
            max_sequences=self.max_sequences or 256,
            cache_gb=self.kv_memory_gb or None,
        )

    def planned_layout(
        self, shape: ModelShape, generation: GenerationLayout, dtype: torch.dtype
    ) -> WeightLayout:
        return engine_layout(shape, generation, shape.params(dtype))
