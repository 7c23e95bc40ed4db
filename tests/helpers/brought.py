"""What a module of plugins brings, against a list written by hand."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any

import attrs


def check_brought(module: ModuleType, **targets: type) -> None:
    """The module brings these classes by these names, in this order; configs are classes of settings."""
    descriptors = module.hybridflow_plugins()
    found = [(descriptor.name, loaded(descriptor.factory)) for descriptor in descriptors]
    assert found == list(targets.items())
    assert all(attrs.has(loaded(d.config)) for d in descriptors if d.config is not None)


def loaded(path: str) -> Any:
    """What "package.module:Object" names."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)
