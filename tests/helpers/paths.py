"""Where things lie, scripts of ci/ as modules, and which cases of a matrix run (all with `make matrix`)."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from types import ModuleType

import pytest

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
DOCS = ROOT / "docs"
GSM8K = ROOT.parent / "shared" / "data" / "gsm8k"
"""Real data, read where it is; tests of it are skipped elsewhere."""


EVERY = bool(os.environ.get("HYBRIDFLOW_MATRIX"))
matrix = pytest.mark.skipif(not EVERY, reason="of the whole matrix: make matrix")


def script(name: str) -> ModuleType:
    """ci/NAME.py."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "ci" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
