"""The job that the tests of core/running share, and what they read of it."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import attrs
from rich.console import Console

from hybridflow.core.job.job import Job
from hybridflow.core.running.reporting import Reporter
from hybridflow.core.running.run import Run
from hybridflow.kit.testing.runs import TinyRun, tiny_job

ALGORITHM = {"name": "grpo", "prompts_per_step": 4, "group_size": 2}
HELD_OUT = {"data": {"options": {"split": "held-out"}, "limit": 6}, "batch_rows": 4, "samples": 3}
TABLES: dict[str, Any] = {"validation": HELD_OUT}
"""Six sums that training does not see, four of them at a time."""


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
