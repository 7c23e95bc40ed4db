"""What is installed is what is in the folders."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DATA = "backends/sglang/cpu"
"""Installed as data of its package: stubs of another project's modules."""


def test_every_folder_of_modules_is_a_package_that_is_installed():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {
        path.parent.relative_to(ROOT)
        for top in ("core", "backends", "algorithms")
        for path in (ROOT / top).rglob("*.py")
    }
    found = {f"hybridflow.{'.'.join(folder.parts)}" for folder in folders if not str(folder).startswith(DATA)}
    assert sorted(listed) == sorted(found)
