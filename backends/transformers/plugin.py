"""Registers the embedded rollout engine."""

from hybridflow.core.contracts.capabilities import EngineCapabilities
from hybridflow.core.plugins import Descriptor, hookimpl


@hookimpl
def hybridflow_plugins():
    """Return the descriptor of the rollout engine "transformers", the default one."""
    return [
        Descriptor(
            kind="rollout_engine",
            name="transformers",
            factory="hybridflow.backends.transformers.engine:TransformersEngine",
            config="hybridflow.backends.transformers.config:TransformersEngineConfig",
            capabilities=EngineCapabilities(
                tp=True,
                process="either",
            ),
            default=True,
            requires=("transformers",),
            extra="transformers",
        )
    ]
