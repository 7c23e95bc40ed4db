"""A backend and an engine, with what they can do and what they need."""

from hybridflow.core import EngineCapabilities, TrainingCapabilities
from hybridflow.core.plugins import Descriptor, hookimpl


@hookimpl
def hybridflow_plugins():
    return [
        Descriptor(
            kind="training_backend",
            name="striped",
            factory="strangers.striped:Striped",
            config="strangers.settings:StripedConfig",
            capabilities=TrainingCapabilities(models={"policy"}, extras={"tint"}),
            requires=("strange_kernels", "transformers"),
        ),
        Descriptor(
            kind="rollout_engine",
            name="halves",
            factory="strangers.halves:Halves",
            config="strangers.settings:HalvesConfig",
            capabilities=EngineCapabilities(tp=True, extras={"tint"}),
            requires=("strange_kernels", "transformers"),
        ),
    ]
