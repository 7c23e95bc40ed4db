"""What small configs become, and what is said of them when something is wrong."""

from __future__ import annotations

import io
import json
import tomllib
from pathlib import Path
from typing import Any

import attrs
import pytest
from rich.console import Console

from helpers.job_texts import BASE
from hybridflow.core.contracts.observer import Observer
from hybridflow.core.errors import ConfigError
from hybridflow.core.job.job import Job
from hybridflow.core.running.reporting import Reporter
from hybridflow.core.running.run import Run
from hybridflow.kit.testing.runs import TinyRun, tiny_job
from hybridflow.settle.config.load import expand, merge, nest, parse_override
from hybridflow.settle.resolve import resolve_jobs


def jobs(*overrides: str, text: str = BASE) -> list[Job]:
    """The jobs of a config after these overrides."""
    tables = tomllib.loads(text)
    for override in overrides:
        tables = merge(expand(tables), expand(nest(*parse_override(override))))
    return resolve_jobs(tables, "tiny")


def job(*overrides: str, text: str = BASE) -> Job:
    [found] = jobs(*overrides, text=text)
    return found


def problems(*overrides: str, text: str = BASE) -> list[str]:
    """What is wrong with the config after these overrides; fails when nothing is."""
    with pytest.raises(ConfigError) as error:
        jobs(*overrides, text=text)
    return error.value.problems


def problem(*overrides: str, text: str = BASE) -> str:
    found = problems(*overrides, text=text)
    assert len(found) == 1, found
    return found[0]


def model_folder(folder: Path, **fields) -> Path:
    """A Hugging Face folder that can be read, with no weights in it."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(
        json.dumps({"model_type": "qwen2", "vocab_size": 16, **fields})
    )
    (folder / "model.safetensors").write_bytes(b"")
    return folder


ALGORITHM = {"name": "grpo", "prompts_per_step": 4, "group_size": 2}
HELD_OUT = {"data": {"options": {"split": "held-out"}, "limit": 6}, "batch_rows": 4, "samples": 3}
TABLES: dict[str, Any] = {"validation": HELD_OUT}
"""Six sums that training does not see, four of them at a time."""


class Kept(Observer):
    """Keeps the samples that it is shown."""

    def __init__(self) -> None:
        self.samples_of: dict[int, list] = {}

    def samples(self, step, rows):
        self.samples_of.setdefault(step, []).extend(rows)


def job_of(folder: Path, **tables: Any) -> Job:
    """The job, not started, with its runs in `folder`; `tables`: over the usual ones."""
    run = {"folder": str(folder), **tables.pop("run", {})}
    return tiny_job({"algorithm": ALGORITHM, **TABLES, "run": run, **tables})


def reporter(run: Run, tiny: TinyRun, terminal=False, **section) -> tuple[Reporter, io.StringIO]:
    """What the run tells, and where; `section`: fields of [run]."""
    out = io.StringIO()
    console = Console(file=out, width=200, highlight=False, soft_wrap=True, force_terminal=terminal)
    run.job = attrs.evolve(run.job, run=attrs.evolve(run.job.run, **section))
    return Reporter(run.job, tiny.session.prepared, console=console), out
