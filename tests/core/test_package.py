"""What is installed is what is in the folders."""

from __future__ import annotations

import runpy

import setuptools
from helpers.paths import ROOT

DATA = "backends/sglang/cpu"
"""Installed as data of its package: stubs of another project's modules."""


def test_every_folder_of_modules_is_a_package_that_is_installed(monkeypatch):
    monkeypatch.chdir(ROOT)
    given = {}
    monkeypatch.setattr(setuptools, "setup", given.update)
    runpy.run_path("setup.py")
    folders = {
        path.parent.relative_to(ROOT)
        for top in ("core", "kit", "planner", "inference", "cli", "backends", "algorithms")
        for path in (ROOT / top).rglob("*.py")
    }
    found = {
        f"hybridflow.{'.'.join(folder.parts)}"
        for folder in folders
        if not str(folder).startswith(DATA)
    }
    assert sorted(given["packages"]) == sorted(found)
    assert given["package_dir"]["hybridflow.kit"] == "kit"
