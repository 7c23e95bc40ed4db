"""The built-in weight transports."""

from __future__ import annotations

from hybridflow.core.plugins import Descriptor, hookimpl


@hookimpl
def hybridflow_plugins() -> list[Descriptor]:
    here = "hybridflow.backends.transports"
    return [
        Descriptor("transport", "collective", f"{here}.collective:Collective"),
        Descriptor("transport", "shared_memory", f"{here}.shared_memory:SharedMemory"),
        Descriptor("transport", "store", f"{here}.store:ObjectStore"),
        Descriptor("transport", "disk", f"{here}.disk:Disk"),
    ]
