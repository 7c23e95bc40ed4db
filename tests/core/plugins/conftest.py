"""Packages of others, as they are found on sys.path."""

from __future__ import annotations

import importlib
import sys
import textwrap

import pytest


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Installs fake distributions: `site("acme", {"name": "value"}, {"module.py": "source"})`."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(tmp_path))

    def install(package, points, modules=(), version="1.0", folder=tmp_path):
        lines = [f"{name} = {value}" for name, value in points.items()]
        info = folder / f"{package}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"
        )
        (info / "entry_points.txt").write_text("\n".join(["[hybridflow]", *lines]) + "\n")
        for name, source in dict(modules).items():
            (folder / name).write_text(textwrap.dedent(source))
        importlib.invalidate_caches()
        return info

    yield install
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(
            sys.modules[name].__file__
        ):
            del sys.modules[name]
