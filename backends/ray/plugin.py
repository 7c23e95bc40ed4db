"""Registers the Ray runtime."""

from hybridflow.core.contracts.capabilities import RuntimeCapabilities
from hybridflow.core.plugins import Descriptor, hookimpl


@hookimpl
def hybridflow_plugins():
    """Describe the Ray runtime, the default one."""
    return [
        Descriptor(
            kind="runtime",
            name="ray",
            factory="hybridflow.backends.ray.runtime:RayRuntime",
            config="hybridflow.backends.ray.config:RayConfig",
            capabilities=RuntimeCapabilities(cluster=True, replaces=True),
            default=True,
            requires=("ray",),
            extra="ray",
        )
    ]
