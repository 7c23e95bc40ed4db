"""What a test says of a package that it needs, and packages that stand in for it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from hybridflow.core.names import is_installed

UNDECLARED = "import sys; sys.meta_path[:] = [f for f in sys.meta_path if getattr(f, '__module__', '') != '_hybridflow_cpu']\n"
"""Code for an interpreter's beginning: the engines' environment declares torchvision's operators by itself, for vLLM lives
in our process; without that, it is as others are."""


def needs(*packages: str) -> pytest.MarkDecorator:
    """Skipped where one of them is not installed; nothing is imported for that."""
    missing = [package for package in packages if not is_installed(package)]
    return pytest.mark.skipif(
        bool(missing), reason=f"needs {', '.join(missing)}: make test-engines"
    )


def stand_in(
    folder: Path, package: str, version: str | None = None, files: Mapping[str, str] | None = None
) -> None:
    """Write into a folder of sys.path what is found as an installed package: its metadata, its modules' sources."""
    if version is not None:
        info = folder / f"{package.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"
        )
    for name, source in (files or {}).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
