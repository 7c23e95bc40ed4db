"""What a module of plugins brings, against a list written by hand."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any

import attrs

from hybridflow.core.contracts.capabilities import Capabilities


@attrs.frozen
class Brought:
    """One plugin that is expected."""

    kind: str
    name: str
    target: Any
    """What its factory must be."""
    config: type | None = None
    requires: tuple[str, ...] = ()
    extra: str | None = None
    default: bool = False
    capabilities: Capabilities | None = None


def check_brought(module: ModuleType, *expected: Brought) -> None:
    """The module brings these plugins and no others, and the names in them lead there."""
    found = [
        Brought(
            kind=descriptor.kind,
            name=descriptor.name,
            target=loaded(descriptor.factory),
            config=loaded(descriptor.config) if descriptor.config is not None else None,
            requires=descriptor.requires,
            extra=descriptor.extra,
            default=descriptor.default,
            capabilities=descriptor.capabilities,
        )
        for descriptor in module.hybridflow_plugins()
    ]
    assert found == list(expected)


def loaded(path: str) -> Any:
    """What "package.module:Object" names."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)
