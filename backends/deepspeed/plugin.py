"""Registers the DeepSpeed training backend."""

from typing import Any

from hybridflow.core.plugins import Descriptor, hookimpl

CAPABILITIES: dict[str, Any] = {
    "axes": "dp",
    "lora": True,
    "models": "policy, value, score",
    "offload": True,
    "precision": "fp32, bf16",
}


@hookimpl
def hybridflow_plugins():
    return [
        Descriptor(
            kind="training_backend",
            name="deepspeed",
            factory="hybridflow.backends.deepspeed.backend:DeepSpeedBackend",
            config="hybridflow.backends.deepspeed.config:DeepSpeedConfig",
            capabilities=CAPABILITIES,
            requires=("deepspeed", "transformers", "safetensors"),
            extra="deepspeed",
        )
    ]
