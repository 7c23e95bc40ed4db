"""The floors of the house hold: whatever points upwards, or makes a circle, fails `make check`."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.paths import ROOT, script

FOLDERS = script("rooms").FOLDERS
ARROWS = {
    "a mechanism prints": ("core/resharding/plan.py", "from hybridflow.cli.explain import explain"),
    "a rank's part knows the controller's object": (
        "core/resharding/exchange.py",
        "from hybridflow.core.groups.group import WorkerGroup",
    ),
    "a planner starts processes": (
        "planner/search.py",
        "from hybridflow.core.running.session import Session",
    ),
    "what reports knows the loop": (
        "core/running/reporting.py",
        "from hybridflow.core.controller import train",
    ),
    "what validates knows the loop": (
        "core/running/validation.py",
        "from hybridflow.core.controller import train",
    ),
    "a mechanism settles settings": (
        "core/rollouts/weight_sync.py",
        "from hybridflow.settle.config.load import read_config",
    ),
}
"""Imports that once made a circle of ten rooms of core, where their parts are now, and one of settings."""
FORMS = {
    "at the top": "\n{}\n",
    "in a function": "\ndef later():\n    {}\n",
    "for types alone": "\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    {}\n",
}


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The packages alone, under hybridflow/."""
    root = tmp_path_factory.mktemp("copy")
    for folder in FOLDERS:
        ignored = shutil.ignore_patterns("__pycache__", "*.tmpl")
        shutil.copytree(ROOT / folder, root / "hybridflow" / folder, ignore=ignored)
    (root / "hybridflow" / "__init__.py").touch()
    return root


def contracts(root: Path) -> subprocess.CompletedProcess:
    command = [
        str(Path(sys.executable).with_name("lint-imports")),
        "--config",
        str(ROOT / "pyproject.toml"),
        "--no-cache",
    ]
    return subprocess.run(
        command, cwd=root, env={"PYTHONPATH": str(root)}, capture_output=True, text=True
    )


def test_the_copy_as_it_is_passes(copy):
    done = contracts(copy)
    assert done.returncode == 0 and "0 broken" in done.stdout, done.stdout + done.stderr
    assert script("rooms").main(copy / "hybridflow") == 0


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("arrow", ARROWS)
def test_an_arrow_that_is_put_back_fails(copy, arrow, form):
    file, line = ARROWS[arrow]
    path = copy / "hybridflow" / file
    text = path.read_text()
    path.write_text(text + FORMS[form].format(line))
    try:
        done = contracts(copy)
    finally:
        path.write_text(text)
    importer = f"hybridflow.{file.removesuffix('.py').replace('/', '.')}"
    assert done.returncode != 0 and "is not allowed to import" in done.stdout, (
        done.stdout + done.stderr
    )
    assert importer in done.stdout, done.stdout


def test_a_new_room_of_core_needs_a_floor(copy):
    room = copy / "hybridflow" / "core" / "attic"
    room.mkdir()
    (room / "__init__.py").touch()
    try:
        done = contracts(copy)
    finally:
        shutil.rmtree(room)
    assert done.returncode != 0 and "attic" in done.stdout, done.stdout + done.stderr


def test_a_circle_of_rooms_is_found(copy, capsys):
    path = copy / "hybridflow" / "core" / "values" / "text.py"
    text = path.read_text()
    path.write_text(text + "\ndef later():\n    from hybridflow.core.data.rows import Rows\n")
    try:
        status = script("rooms").main(copy / "hybridflow")
    finally:
        path.write_text(text)
    assert status == 1
    assert "core.data" in capsys.readouterr().out.split("circles of rooms:")[1]


def test_a_room_of_core_does_not_come_back_by_the_door(copy, capsys):
    path = copy / "hybridflow" / "core" / "values" / "text.py"
    text = path.read_text()
    path.write_text(text + "\ndef later():\n    from hybridflow.core import WorkerGroup\n")
    try:
        assert script("rooms").main(copy / "hybridflow") == 1
    finally:
        path.write_text(text)
    assert "core.values.text imports hybridflow.core" in capsys.readouterr().out
