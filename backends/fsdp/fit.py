"""Which models tensor parallelism cuts."""

from __future__ import annotations

from typing import Any

from torch import nn

COLWISE = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
)
"""Linear layers of a decoder layer whose outputs tensor parallelism cuts."""
ROWWISE = ("self_attn.o_proj", "mlp.down_proj")
"""Linear layers of a decoder layer whose inputs tensor parallelism cuts."""
LINEAR = (*COLWISE, *ROWWISE)
DIVIDED = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
"""Sizes of a model that tp must divide."""


def why_not_cut(hf: Any, tp: int) -> list[str]:
    """Return why tp cannot cut a Hugging Face model: other layers, or sizes that do not divide."""
    if tp == 1:
        return []
    config = hf.config
    layers = getattr(hf.base_model, "layers", None)
    if layers is None or not all(_has(layer, name) for layer in layers for name in LINEAR):
        return [
            f"tp {tp} needs a Llama-like model (q_proj ... down_proj); {config.model_type!r} is "
            "not one: set layout.tp = 1"
        ]
    sizes = {name: getattr(config, name) for name in DIVIDED}
    uneven = [f"{name} {size}" for name, size in sizes.items() if size % tp]
    if not uneven:
        return []
    return [f"tp {tp} must divide the model's {', '.join(uneven)}; choose a smaller layout.tp"]


def _has(module: nn.Module, path: str) -> bool:
    """Return whether a module has a linear layer at a dotted path."""
    for name in path.split("."):
        if not hasattr(module, name):
            return False
        module = getattr(module, name)
    return isinstance(module, nn.Linear)
