"""One tiny job whose models are built, which the tests of this folder make runs of."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest
from helpers.jobs import ALGORITHM, TABLES

from hybridflow.core.running.checkpoint import Checkpoints
from hybridflow.core.running.run import Run
from hybridflow.kit.testing import TinyRun


@pytest.fixture(scope="session")
def tiny():
    with TinyRun(ALGORITHM, TABLES) as tiny:
        yield tiny


@pytest.fixture
def run_of(tiny, tmp_path):
    """`run_of(**fields)`: a run of the tiny job in its own folder; `fields`: of [validation]."""

    def run_of(of: TinyRun = tiny, folder: Path = tmp_path, **validation) -> Run:
        section = attrs.evolve(of.job.validation, **validation)
        job = attrs.evolve(of.job, folder=folder, validation=section)
        return Run(job, of.session, of.session.context(), Checkpoints(folder / "checkpoints", 2))

    return run_of
