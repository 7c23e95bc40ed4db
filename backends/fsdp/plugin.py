"""Registers the FSDP2 training backend."""

from typing import Any

from hybridflow.core.plugins import Descriptor, hookimpl

CAPABILITIES: dict[str, Any] = {
    "axes": "dp, tp",
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
            name="fsdp",
            factory="hybridflow.backends.fsdp.backend:FSDPBackend",
            config="hybridflow.backends.fsdp.config:FSDPConfig",
            capabilities=CAPABILITIES,
            requires=("transformers", "safetensors"),
            extra="fsdp",
        )
    ]
