"""A configuration from its file to its last stage."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from hybridflow.core.config.load import read_config
from hybridflow.core.controller import Outcome, run_job
from hybridflow.core.errors import ConfigError
from hybridflow.core.job.job import Job
from hybridflow.core.job.models import with_exports
from hybridflow.core.job.placement import resolve_placed
from hybridflow.core.job.schema import SHORTHAND
from hybridflow.core.running.folder import claim
from hybridflow.core.running.run import goal_reached
from hybridflow.core.running.session import prepare_all

DONE = "done.json"


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> list[Job]:
    """The jobs (stages, in order) of a TOML file with `key=value` overrides. Raises ConfigError with all problems."""
    tables, provenance = read_config(path, overrides, SHORTHAND)
    return resolve_placed(tables, Path(path).stem, SHORTHAND, provenance)


def run(
    path: str | Path, overrides: Sequence[str] = (), resume: bool = False, overwrite: bool = False
) -> Outcome:
    """Run a config; prints as its last line how the held-out set was answered after each stage."""
    jobs = load_config(path, overrides)
    _refuse_what_is_there(jobs, resume, overwrite)
    prepared = prepare_all(jobs)
    if overwrite and not resume:
        for (
            job
        ) in jobs:  # every stage's: what a later one has left would be taken for done by a --resume
            with claim(job, resume, overwrite):
                pass
    outcomes: dict[str, Outcome] = {}
    outcome = Outcome("finished", 0, {})
    for at, job in enumerate(jobs):
        if resume and (done := _read_done(job)) is not None:
            outcome = done
        else:
            needed = any(later.follows_stage(job) for later in jobs[at + 1 :])
            outcome = run_job(
                with_exports(job), prepared[at], resume, overwrite, export=job.run.export or needed
            )
            if outcome.state != "finished":
                return outcome
            (job.folder / DONE).write_text(
                json.dumps({"step": outcome.step, "validations": outcome.validations})
            )
        outcomes[job.stage or job.name] = outcome
    if summary := summarise(jobs, outcomes):
        print(summary, flush=True)
    return outcome


def _refuse_what_is_there(jobs: list[Job], resume: bool, overwrite: bool) -> None:
    """Before the first stage starts, not when the second one does."""
    for job in jobs:
        if (job.folder / "run.json").exists() and not (resume or overwrite):
            raise ConfigError(
                f"there is a run in {job.folder} already; go on with it (--resume), replace it (--overwrite), or give this "
                "run a name of its own (run.name=...)"
            )


def _read_done(job: Job) -> Outcome | None:
    """How the run ended, if by its config as it is now it has: more steps or a higher goal let it go on."""
    if not (job.folder / DONE).exists():
        return None
    done = json.loads((job.folder / DONE).read_text())
    outcome = Outcome("finished", done["step"], {int(k): v for k, v in done["validations"].items()})
    return (
        outcome if outcome.step >= job.run.steps or goal_reached(job, outcome.validations) else None
    )


def summarise(jobs: list[Job], outcomes: dict[str, Outcome]) -> str | None:
    """For example "held-out exact match: warm-up 0.62, final 0.97"."""
    figures: list[tuple[str, float]] = []
    last = None
    for job in jobs:
        found = outcomes[job.stage or job.name].validations
        scores = {
            step: values["validation/score"]
            for step, values in found.items()
            if "validation/score" in values
        }
        if not scores:
            continue
        if 0 in scores and len(scores) > 1 and not figures:
            figures.append(("start", scores[0]))
        last = job
        figures.append(("final" if job is jobs[-1] else job.stage or job.name, scores[max(scores)]))
    if last is None or last.validation is None:
        return None
    what = last.rewards[0].name if len(last.rewards) == 1 else "score"
    return f"{last.validation.name} {what.replace('_', ' ')}: " + ", ".join(
        f"{name} {value:.2f}" for name, value in figures
    )
