"""Registers the inline runtime."""

from hybridflow.core.contracts.capabilities import RuntimeCapabilities
from hybridflow.core.plugins import Descriptor, hookimpl


@hookimpl
def hybridflow_plugins():
    """Describe the inline runtime."""
    return [
        Descriptor(
            kind="runtime",
            name="inline",
            factory="hybridflow.backends.inline.runtime:InlineRuntime",
            config="hybridflow.backends.inline.runtime:InlineConfig",
            capabilities=RuntimeCapabilities(processes=False, max_ranks=1),
        )
    ]
