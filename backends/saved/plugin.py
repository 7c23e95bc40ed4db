"""Registers the backend that only reads weights."""

from hybridflow.core.contracts.capabilities import TrainingCapabilities
from hybridflow.core.plugins import Descriptor, hookimpl

CAPABILITIES = TrainingCapabilities(models=frozenset({"policy"}))
"""The backend's capabilities, which are read without importing it."""


@hookimpl
def hybridflow_plugins():
    """Return the descriptor of the training backend "saved"."""
    return [
        Descriptor(
            kind="training_backend",
            name="saved",
            factory="hybridflow.backends.saved.backend:SavedBackend",
            config="hybridflow.backends.saved.config:SavedConfig",
            capabilities=CAPABILITIES,
            requires=("transformers", "safetensors"),
            extra="transformers",
        )
    ]
