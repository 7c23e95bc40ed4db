"""Registers the DeepSpeed training backend."""

from hybridflow.core.contracts.capabilities import TrainingCapabilities
from hybridflow.core.plugins import Descriptor, hookimpl

CAPABILITIES = TrainingCapabilities(
    axes=frozenset({"dp"}),
)


@hookimpl
def hybridflow_plugins():
    """Return the descriptor of the training backend "deepspeed"."""
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
