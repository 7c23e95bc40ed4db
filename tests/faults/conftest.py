"""What the tests of faults share: `tiny`, a folder with tiny.toml, and `trained`, the same after two steps."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.tiny import exported, write

from hybridflow.cli.main import main

KEPT = ("run.checkpoint_every=1", "run.samples=1", 'run.trackers=["jsonl", "tensorboard"]')


@pytest.fixture
def tiny(tmp_path, monkeypatch) -> Iterator[Path]:
    """The current folder, with the smallest config that runs; its rewards are found there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    sys.modules.pop("rewards", None)
    write(tmp_path)
    yield tmp_path
    sys.modules.pop("rewards", None)


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory) -> Path:
    """The folder of a run of two steps, with a checkpoint after each."""
    folder = tmp_path_factory.mktemp("two-steps")
    write(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", [str(folder), *sys.path])
        assert main(["run", "tiny.toml", "run.steps=2", *KEPT]) == 0
    sys.modules.pop("rewards", None)
    return folder / "runs/tiny"


@pytest.fixture
def trained(tiny, two_steps) -> Path:
    """A copy of that run's folder, in `tiny`."""
    shutil.copytree(two_steps, tiny / "runs/tiny")
    return tiny / "runs/tiny"


@pytest.fixture
def resume(tiny, capsys):
    """resume(*settings) -> (status, all that was printed): `run --resume` of `trained` to four steps."""

    def resumed(*settings: str) -> tuple[int, str]:
        capsys.readouterr()
        status = main(["run", "tiny.toml", "--resume", "run.steps=4", *KEPT, *settings])
        printed = capsys.readouterr()
        return status, printed.out + printed.err

    return resumed


@pytest.fixture(scope="module")
def four_steps(two_steps, tmp_path_factory) -> bytes:
    """The exported weights of the undamaged run after four steps."""
    folder = tmp_path_factory.mktemp("four-steps")
    write(folder)
    shutil.copytree(two_steps, folder / "runs/tiny")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", [str(folder), *sys.path])
        assert main(["run", "tiny.toml", "--resume", "run.steps=4", *KEPT]) == 0
    sys.modules.pop("rewards", None)
    return exported(folder / "runs/tiny")
