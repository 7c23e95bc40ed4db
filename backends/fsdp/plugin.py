"""Registers the FSDP2 training backend."""

from hybridflow.core.contracts.capabilities import TrainingCapabilities
from hybridflow.core.plugins import Descriptor, hookimpl

CAPABILITIES = TrainingCapabilities(
    axes=frozenset({"dp", "tp"}),
)
"""The backend's capabilities, which are read without importing it."""


@hookimpl
def hybridflow_plugins():
    """Return the descriptor of the training backend "fsdp", the default one."""
    return [
        Descriptor(
            kind="training_backend",
            name="fsdp",
            factory="hybridflow.backends.fsdp.backend:FSDPBackend",
            config="hybridflow.backends.fsdp.config:FSDPConfig",
            capabilities=CAPABILITIES,
            default=True,
            requires=("transformers", "safetensors"),
            extra="fsdp",
        )
    ]
