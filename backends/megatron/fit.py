"""Which models and layouts the backend megatron runs, by their configs, without Megatron."""

from __future__ import annotations

from typing import Any

from hybridflow.backends.megatron.config import MegatronConfig
from hybridflow.core.values.parallel import ParallelLayout
from hybridflow.kit.huggingface.models import windows_of

ARCHITECTURES = ("qwen2", "qwen3", "llama", "mistral")
LLAMA3 = (1.0, 4.0, 8192)
"""low_freq_factor, high_freq_factor and original_max_position_embeddings of the one scaling of
rotary embeddings that Megatron has; they are built in."""
OTHER = "choose backend fsdp or deepspeed"


def why_not(hf: Any, config: MegatronConfig, layout: ParallelLayout) -> list[str]:
    """Return why the backend cannot build a model of the Hugging Face config `hf`, or cut it so."""
    if hf.model_type not in ARCHITECTURES:
        return [
            f"backend megatron builds {', '.join(ARCHITECTURES)}; got {hf.model_type!r}: {OTHER}"
        ]
    problems = []
    if hf.hidden_act != "silu":
        problems.append(
            f"backend megatron knows the activation silu, got {hf.hidden_act!r}: {OTHER}"
        )
    if getattr(hf, "mlp_bias", False) or (
        getattr(hf, "attention_bias", False) and hf.model_type != "qwen2"
    ):
        problems.append(
            "backend megatron has no biases of the MLP and of attention's output, as this model "
            f"has: {OTHER}"
        )
    if windows_of(hf, hf.max_position_embeddings):
        problems.append(
            "backend megatron has no sliding windows, which are shorter in this model than its "
            f"longest sequence: {OTHER}"
        )
    parameters = getattr(hf, "rope_parameters", None) or {}
    if parameters.get("rope_type", "default") != "default" and not is_llama3(parameters):
        problems.append(
            f"backend megatron does not compute rotary embeddings of type {parameters}: {OTHER}"
        )

    # Heads and the columns of the MLP are dealt out over tp.
    sizes = {
        "num_attention_heads": hf.num_attention_heads,
        "num_key_value_heads": hf.num_key_value_heads,
        "intermediate_size": hf.intermediate_size,
    }
    indivisible = [f"{name} {size}" for name, size in sizes.items() if size % layout.tp]
    if indivisible:
        problems.append(
            f"tp {layout.tp} must divide the model's {', '.join(indivisible)}; "
            "choose a smaller layout.tp"
        )
    if hf.num_hidden_layers % (layout.pp * config.virtual_stages):
        problems.append(
            f"{hf.num_hidden_layers} layers do not divide into pp {layout.pp} x "
            f"virtual_stages {config.virtual_stages}; choose others"
        )
    return problems


def is_llama3(parameters: dict[str, Any]) -> bool:
    """Return whether rotary embeddings are scaled as Megatron's are."""
    constants = (
        parameters.get("low_freq_factor"),
        parameters.get("high_freq_factor"),
        parameters.get("original_max_position_embeddings"),
    )
    return parameters.get("rope_type") == "llama3" and constants == LLAMA3
