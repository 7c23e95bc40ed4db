"""Registers the Megatron training backend."""

from typing import Any

from hybridflow.core.plugins import Descriptor, hookimpl

CAPABILITIES: dict[str, Any] = {
    "axes": "dp, tp, pp",
    "lora": False,
    "models": "policy, value, score",
    "offload": True,
    "precision": "fp32, bf16",
}


@hookimpl
def hybridflow_plugins():
    return [
        Descriptor(
            kind="training_backend",
            name="megatron",
            factory="hybridflow.backends.megatron.backend:MegatronBackend",
            config="hybridflow.backends.megatron.config:MegatronConfig",
            capabilities=CAPABILITIES,
            requires=("megatron.core", "transformers", "safetensors"),
            extra="megatron",
        )
    ]
