"""Packages of strangers, installed by pip into a folder of their own, and commands that see them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


def install(folder: Path, *sources: Path) -> Path:
    """Without the network; where the packages are."""
    pytest.importorskip("setuptools", reason="builds the package with the setuptools that is here")
    # A build leaves files beside the sources.
    copies = [shutil.copytree(source, folder / "sources" / source.name) for source in sources]
    options = [
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--quiet",
        "--disable-pip-version-check",
    ]
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        *options,
        "--target",
        str(folder / "packages"),
        *map(str, copies),
    ]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return folder / "packages"


def python(
    installed: Path | str | None, cwd: Path, *arguments: str
) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(installed or "")}
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True
    )


def hybridflow(
    installed: Path | str | None, cwd: Path, *arguments: str
) -> subprocess.CompletedProcess[str]:
    return python(installed, cwd, "-m", "hybridflow.cli.main", *arguments)
