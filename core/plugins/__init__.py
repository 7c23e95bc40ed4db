"""The plugin registry and what a plugin says of itself (docs/plugins.md)."""

from hybridflow.core.plugins.descriptor import API_VERSION, KINDS, Descriptor, check_api
from hybridflow.core.plugins.hookspecs import hookimpl
from hybridflow.core.plugins.registry import Entry, Registry, registry

__all__ = ["API_VERSION", "KINDS", "Descriptor", "Entry", "Registry", "check_api", "hookimpl", "registry"]
