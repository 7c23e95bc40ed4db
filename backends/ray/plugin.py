"""Registers the Ray runtime."""

from hybridflow.core.plugins import Descriptor, hookimpl


@hookimpl
def hybridflow_plugins():
    return [
        Descriptor(
            kind="runtime",
            name="ray",
            factory="hybridflow.backends.ray.runtime:RayRuntime",
            config="hybridflow.backends.ray.config:RayConfig",
            capabilities={"processes": True, "collectives": "any number of ranks", "cluster": True},
            requires=("ray",),
            extra="ray",
        )
    ]
