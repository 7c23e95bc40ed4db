"""Registers the embedded rollout engine."""

from hybridflow.core.plugins import Descriptor, hookimpl


@hookimpl
def hybridflow_plugins():
    return [
        Descriptor(
            kind="rollout_engine",
            name="transformers",
            factory="hybridflow.backends.transformers.engine:TransformersEngine",
            config="hybridflow.backends.transformers.config:TransformersEngineConfig",
            capabilities={
                "tp": True, "devices": "cpu, cuda", "abort": True, "sleep": True, "continuous": True, "inflight": True,
                "process": "either",
            },
            requires=("transformers",),
            extra="transformers",
        )
    ]  # fmt: skip
