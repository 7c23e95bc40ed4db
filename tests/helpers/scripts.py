"""Scripts of ci/, as modules."""

from __future__ import annotations

import importlib.util
from types import ModuleType

from helpers.paths import ROOT


def script(name: str) -> ModuleType:
    """ci/NAME.py."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "ci" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
