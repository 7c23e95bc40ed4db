"""A config from its file to the end of its last run stage."""

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
"""The file in a run's folder that holds its Outcome, once the run is finished."""


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> list[Job]:
    """Read a TOML file with `key=value` overrides into jobs, one per run stage, in order.

    Raises ConfigError with all problems.
    """
    tables, provenance = read_config(path, overrides, SHORTHAND)
    return resolve_placed(tables, Path(path).stem, SHORTHAND, provenance)


def run(
    path: str | Path, overrides: Sequence[str] = (), resume: bool = False, overwrite: bool = False
) -> Outcome:
    """Run a config and return how its last run stage ended.

    The last line printed has the validation score after each run stage. With `resume`, finished
    run stages are skipped and the others go on from their last checkpoints; `overwrite` deletes
    what earlier runs left.
    """
    # Everything that can be wrong in any run stage is checked before the first one starts.
    jobs = load_config(path, overrides)
    _refuse_existing_runs(jobs, resume, overwrite)
    prepared = prepare_all(jobs)

    # All folders are emptied: a --resume would take an old later run stage for a finished one.
    if overwrite and not resume:
        for job in jobs:
            with claim(job, resume, overwrite):
                pass

    # A run stage exports its models if it should, or if a later one begins with them.
    outcomes: dict[str, Outcome] = {}
    outcome = Outcome("finished", 0, {})
    for index, job in enumerate(jobs):
        if resume and (done := _read_done(job)) is not None:
            outcome = done
        else:
            needed = any(later.follows_stage(job) for later in jobs[index + 1 :])
            export = job.run.export or needed
            outcome = run_job(with_exports(job), prepared[index], resume, overwrite, export)
            if outcome.state != "finished":
                return outcome

            record = {"step": outcome.step, "validations": outcome.validations}
            (job.folder / DONE).write_text(json.dumps(record))
        outcomes[job.stage or job.name] = outcome

    if summary := summarise(jobs, outcomes):
        print(summary, flush=True)
    return outcome


def _refuse_existing_runs(jobs: list[Job], resume: bool, overwrite: bool) -> None:
    """Raise ConfigError if a folder has a run already, before the first run stage starts."""
    for job in jobs:
        if (job.folder / "run.json").exists() and not (resume or overwrite):
            raise ConfigError(
                f"there is a run in {job.folder} already; go on with it (--resume), "
                "replace it (--overwrite), or give this run a name of its own (run.name=...)"
            )


def _read_done(job: Job) -> Outcome | None:
    """Return how the run ended, or None if there is still something to train.

    The config of today decides: more steps or a higher goal let a finished run go on.
    """
    if not (job.folder / DONE).exists():
        return None

    record = json.loads((job.folder / DONE).read_text())
    validations = {int(step): values for step, values in record["validations"].items()}
    outcome = Outcome("finished", record["step"], validations)
    if outcome.step >= job.run.steps or goal_reached(job, outcome.validations):
        return outcome
    return None


def summarise(jobs: list[Job], outcomes: dict[str, Outcome]) -> str | None:
    """Return a line such as "held-out exact match: warm-up 0.62, final 0.97".

    It is None where no run stage was validated.
    """
    figures: list[tuple[str, float]] = []
    last = None
    for job in jobs:
        validations = outcomes[job.stage or job.name].validations
        scores = {
            step: values["validation/score"]
            for step, values in validations.items()
            if "validation/score" in values
        }
        if not scores:
            continue

        # The score before any training comes first, where there is one.
        if 0 in scores and len(scores) > 1 and not figures:
            figures.append(("start", scores[0]))
        last = job
        label = "final" if job is jobs[-1] else job.stage or job.name
        figures.append((label, scores[max(scores)]))

    # A single reward names the score ("exact match").
    if last is None or last.validation is None:
        return None
    metric = last.rewards[0].name if len(last.rewards) == 1 else "score"
    listed = ", ".join(f"{name} {value:.2f}" for name, value in figures)
    return f"{last.validation.name} {metric.replace('_', ' ')}: {listed}"
