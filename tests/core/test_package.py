"""What is installed is what is in the folders."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
import zipfile

import setuptools
from helpers.job_texts import BASE
from helpers.paths import ROOT

TOPS = ("core", "settle", "kit", "planner", "inference", "report", "cli", "backends", "algorithms")
DATA = "backends/sglang/cpu"
"""Installed as data of its package: stubs of another project's modules."""


def test_every_folder_of_modules_is_a_package_that_is_installed(monkeypatch):
    monkeypatch.chdir(ROOT)
    given = {}
    monkeypatch.setattr(setuptools, "setup", given.update)
    runpy.run_path("setup.py")
    folders = {path.parent.relative_to(ROOT) for top in TOPS for path in (ROOT / top).rglob("*.py")}
    found = {
        f"hybridflow.{'.'.join(folder.parts)}"
        for folder in folders
        if not str(folder).startswith(DATA)
    }
    assert sorted(given["packages"]) == sorted(found)
    assert given["package_dir"]["hybridflow.kit"] == "kit"


def test_a_wheel_has_everything_that_a_run_needs(tmp_path):
    source, target = tmp_path / "source", tmp_path / "installed"
    ignored = shutil.ignore_patterns("__pycache__")
    for top in TOPS:
        shutil.copytree(ROOT / top, source / top, ignore=ignored)
    for file in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source / file)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "-q", "--no-deps"]
    build = ["--no-build-isolation", "-w", str(tmp_path), str(source)]
    done = subprocess.run([*pip, *build], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        files.extractall(target)

    # The repository's folders are in this environment too: what is imported must be the wheel's.
    (tmp_path / "tiny.toml").write_text(BASE + 'run.trackers = ["jsonl"]\n')
    code = (
        "import hybridflow.core.controller as module, sys\n"
        "from hybridflow.settle import run\n"
        "print(module.__file__)\n"
        "outcome = run('tiny.toml', ['run.steps=1', 'data.limit=8'])\n"
        "print(outcome.state, outcome.step)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(target)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == str(target / "hybridflow/core/controller.py")
    assert lines[-1] == "finished 1"
    assert (tmp_path / "runs/tiny/metrics.jsonl").read_text().count("\n") == 1
