"""The plugin registry, and the descriptors by which plugins register (docs/plugins.md)."""

from hybridflow.core.plugins.descriptor import KINDS, Descriptor
from hybridflow.core.plugins.hookspecs import hookimpl
from hybridflow.core.plugins.lookup import Entry, Registry, registry

__all__ = ["KINDS", "Descriptor", "Entry", "Registry", "hookimpl", "registry"]
