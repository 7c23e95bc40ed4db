"""Registers the built-in weight transports."""

from __future__ import annotations

from hybridflow.core.contracts.capabilities import TransportCapabilities
from hybridflow.core.plugins import Descriptor, hookimpl

HERE = "hybridflow.backends.transports"
BUILT_IN = (
    ("shared_memory", f"{HERE}.shared_memory:SharedMemory"),
    ("collective", f"{HERE}.collective:Collective"),
    ("store", f"{HERE}.store:ObjectStore"),
    ("disk", f"{HERE}.disk:Disk"),
)
"""Name and class of each transport, in the order in which `transport = "auto"` tries them."""


@hookimpl
def hybridflow_plugins() -> list[Descriptor]:
    """Describe the transports."""
    return [
        Descriptor("transport", name, factory, capabilities=TransportCapabilities(order=order))
        for order, (name, factory) in enumerate(BUILT_IN)
    ]
