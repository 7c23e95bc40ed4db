"""Registers the Megatron training backend."""

from hybridflow.core.contracts.capabilities import TrainingCapabilities
from hybridflow.core.plugins import Descriptor, hookimpl

CAPABILITIES = TrainingCapabilities(
    axes=frozenset({"dp", "tp", "pp"}),
)


@hookimpl
def hybridflow_plugins():
    """Return the descriptor of the training backend "megatron"."""
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
