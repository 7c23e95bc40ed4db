"""Runs a config, from its file to the end of its last run stage."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import attrs

from hybridflow.core.contracts.capabilities import RuntimeCapabilities
from hybridflow.core.controller import RunOutcome, run_job
from hybridflow.core.errors import ConfigError, DamagedError
from hybridflow.core.job.job import Job
from hybridflow.core.names import did_you_mean
from hybridflow.core.plugins import registry
from hybridflow.core.running import supervised
from hybridflow.core.running.checkpoint import checkpoints_of
from hybridflow.core.running.folder import claim
from hybridflow.core.running.origin import origin
from hybridflow.core.running.run import goal_reached
from hybridflow.core.running.session import prepare_all, try_rewards
from hybridflow.core.values.files import BESIDE, MARK, SETTINGS, STARTS
from hybridflow.core.values.sealed import read_sealed
from hybridflow.settle.changes import Change, check_changes, settings
from hybridflow.settle.config.load import read_config
from hybridflow.settle.config.waiting import BRIEFLY, VARIABLE, wait_briefly
from hybridflow.settle.kept import (
    Done,
    kept,
    read_done,
    results_of,
    to_export,
    to_train,
    write_done,
)
from hybridflow.settle.models import with_exports
from hybridflow.settle.placement import resolve_placed
from hybridflow.settle.predictions import predicted
from hybridflow.settle.remarks import remarks


def load_config(config: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> list[Job]:
    """Read a TOML file with `key=value` overrides into jobs, one per run stage, in order.

    `config` may be the file's tables as well; their run is called "run" unless run.name is given.
    Raises ConfigError with all problems.
    """
    tables, provenance = read_config(config, overrides)
    name = "run" if isinstance(config, Mapping) else Path(config).stem
    return resolve_placed(tables, name, provenance)


def run(
    config: str | Path | Mapping[str, Any],
    overrides: Sequence[str] = (),
    resume: bool = False,
    overwrite: bool = False,
    stage: str | None = None,
) -> RunOutcome:
    """Run a config, a TOML file or its tables, and return how its last run stage ended.

    The last lines printed have the validation score after each run stage, and where the model is.
    With `resume`, finished run stages are skipped and the others go on from their last checkpoints;
    `overwrite` deletes the folders of earlier runs. With `stage` that stage alone is run, from the
    models of the finished stages before it.
    """
    # Everything that can be wrong in any run stage is checked before the first one starts.
    every = load_config(config, overrides)
    beside = None if isinstance(config, Mapping) else str(Path(config).parent.resolve())
    chosen = range(len(every)) if stage is None else [_place_of(every, stage)]
    jobs = [every[at] for at in chosen]
    _refuse_existing_runs(jobs, resume, overwrite)
    following = [every[at + 1 :] for at in chosen]
    for at, job in zip(chosen, jobs, strict=True):
        if stage is not None:
            _refuse_missing_stages(job, every[:at])
        if stage is not None and overwrite:
            _refuse_begun_stages(job, every[at + 1 :])
    done: list[Done | None] = [None] * len(jobs)
    changed: list[list[Change] | None] = [[] for _ in jobs]
    if resume:
        changed = _changes(jobs)
        done = [_still_done(*stage) for stage in zip(jobs, following, strict=True)]
    prepared = prepare_all(jobs)
    # The first stage's rewards are tried once it has workers; those of later stages are tried here,
    # as their errors would only show after hours.
    for job, ready, over in list(zip(jobs, prepared, done, strict=True))[1:]:
        if over is None:
            try_rewards(job, ready)
    if None in done:
        _note_spinning(jobs)

    # All folders are emptied: a --resume would take an old later run stage for a finished one.
    if overwrite and not resume:
        for job in jobs:
            with claim(job, resume, overwrite):
                pass

    outcomes: dict[str, RunOutcome] = {}
    outcome = RunOutcome("finished", 0, {})
    for index, job in enumerate(jobs):
        if (earlier := done[index]) is not None:
            outcome = RunOutcome("finished", earlier.step, earlier.validations)
            reached = ""
            if goal_reached(job, earlier.validations):
                assert job.validation is not None
                reached = f": the score has reached validation.stop_at = {job.validation.stop_at}"
            print(
                f"{job.stage or job.name}: finished already, at step {outcome.step}{reached}",
                flush=True,
            )
        else:
            if resume:
                print(_goes_on(job, changed[index]), flush=True)
            export = _exports(job, following[index])
            job = with_exports(job)
            notes = (*remarks(job), *prepared[index].notes)
            ready = attrs.evolve(prepared[index], notes=notes)
            starts = [*(_starts(job) if resume else ()), origin(Path(beside or "."))]
            mark = {SETTINGS: settings(job), BESIDE: beside, STARTS: starts}
            comparison = predicted(job)
            observers = list(
                chain.from_iterable(registry().notify("hybridflow_observers", job=job))
            )
            if comparison is not None:
                observers.append(comparison)
            anew = overwrite or _left_nothing(job)
            outcome = run_job(job, ready, resume, anew, export, mark, observers)
            if outcome.state != "finished":
                return outcome
            write_done(job, Done(outcome.step, outcome.validations, export))
            if outcome.asked and None in done[index + 1 :]:
                return attrs.evolve(outcome, state="stopped")
        outcomes[job.stage or job.name] = outcome

    if summary := summarise(jobs, outcomes):
        print(summary, flush=True)
    print(kept(jobs[-1]), flush=True)
    return outcome


def _place_of(jobs: list[Job], stage: str) -> int:
    """Return the index of a run stage among the jobs. Raises ConfigError where there is none."""
    names = [job.stage for job in jobs if job.stage is not None]
    if stage not in names:
        raise ConfigError(
            f"--stage {stage}: the config has no such stage{did_you_mean(stage, names)} "
            f"(stages: {', '.join(names) or 'none'})"
        )
    return names.index(stage)


def _refuse_missing_stages(job: Job, earlier: list[Job]) -> None:
    """Raise ConfigError where a stage that this one begins with has not finished."""
    for other in earlier:
        if job.follows_stage(other) and read_done(other) is None:
            raise ConfigError(
                f"--stage {job.stage}: it begins with the model of {other.stage}, which has not "
                f"finished in {other.folder}; run that first, or leave --stage out"
            )


def _refuse_begun_stages(job: Job, later: list[Job]) -> None:
    """Raise ConfigError where a later stage has begun with the model that would be replaced."""
    for other in later:
        if other.follows_stage(job) and (other.folder / MARK).exists():
            raise ConfigError(
                f"--stage {job.stage} --overwrite: {other.stage} has begun with its model; remove "
                f"{other.folder} too, or leave --stage out"
            )


def _note_spinning(jobs: list[Job]) -> None:
    """Log a note where threads spin because it is too late to change that."""
    # Workers in processes of their own get the variable from their runtime.
    here = [job for job in jobs if _in_this_process(job)]
    if not all(wait_briefly(job.tables) for job in here):
        print(
            "note: torch was imported before this run, so its threads spin while they wait, which "
            f"is slow beside other work: set {VARIABLE}={BRIEFLY} in the environment "
            "(runtime.spin = true silences this note)",
            flush=True,
        )


def _in_this_process(job: Job) -> bool:
    can = registry().capabilities("runtime", job.runtime)
    return isinstance(can, RuntimeCapabilities) and not can.processes


def _refuse_existing_runs(jobs: list[Job], resume: bool, overwrite: bool) -> None:
    """Raise ConfigError if a folder has a run already, before the first run stage starts."""
    for job in jobs:
        if (job.folder / MARK).exists() and not (resume or overwrite or _left_nothing(job)):
            raise ConfigError(
                f"there is a run in {job.folder} already; go on with it (--resume), "
                "replace it (--overwrite), or give this run a name of its own (run.name=...)"
            )


def _starts(job: Job) -> list[Any]:
    """Return the starts of the run in the job's folder so far; none where its mark is damaged."""
    with contextlib.suppress(FileNotFoundError, DamagedError):
        return list(read_sealed(job.folder / MARK).get(STARTS, ()))
    return []


def _left_nothing(job: Job) -> bool:
    """Return whether the run in the job's folder ended before it wrote any results."""
    return not results_of(job) and not checkpoints_of(job).steps()


def _changes(jobs: list[Job]) -> list[list[Change] | None]:
    """Return the changed settings of each stage, None where its folder has none.

    Raises ConfigError with those that are not allowed.
    """
    changed = []
    problems: list[str] = []
    for job in jobs:
        try:
            changed.append(check_changes(job))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return changed


def _goes_on(job: Job, changed: list[Change] | None) -> str:
    """Return a line on what --resume does with a stage that is not finished."""
    name = job.stage or job.name
    steps = checkpoints_of(job).steps()
    if not steps:
        return f"{name}: nothing to go on from in {job.folder}; it begins at step 1"
    listed = "not known: its run.json is missing"
    if changed is not None:
        listed = "; ".join(map(str, changed)) or "nothing"
    return f"{name}: going on from step {steps[-1]}; changed: {listed}"


def _exports(job: Job, later: list[Job]) -> bool:
    """Return whether a run stage exports its models: by run.export, or for a later stage."""
    return job.run.export or any(other.follows_stage(job) for other in later)


def _still_done(job: Job, later: list[Job]) -> Done | None:
    """Return how a run stage ended, or None if there is something to train or to export.

    With more steps or a higher goal in the present config, a finished run goes on. Raises
    ConfigError where that would replace models with which a later stage has begun.
    """
    done = read_done(job)
    if done is None:
        _refuse_lost_run(job)
        return None
    more = to_train(job, done)
    if not more and not to_export(job, done, _exports(job, later)):
        return done

    # A later stage that has begun would no longer match the models it began with.
    prefix = f"stages.{job.stage}." if job.stage else ""
    begun = [
        other for other in later if other.follows_stage(job) and (other.folder / MARK).exists()
    ]
    if more and begun:
        raise ConfigError(
            f"{prefix}run.steps: is {job.run.steps}, the stage ended at step {done.step}, and "
            f"{begun[0].stage} has begun with its model; remove {begun[0].folder} to train both "
            f"on, or set {prefix}run.steps={done.step}"
        )
    _refuse_lost_run(job)
    return None


def _refuse_lost_run(job: Job) -> None:
    """Raise ConfigError where a run has results but no checkpoint: they would be replaced.

    Not where a supervisor starts it again: they are those of its start before, which has died.
    """
    if supervised.again():
        return
    results = results_of(job)
    if results and not checkpoints_of(job).steps():
        names = ", ".join(results[:4])
        raise ConfigError(
            f"--resume: nothing to go on from in {job.folder}: it has no checkpoint. What is there "
            f"({names}) would be replaced: --overwrite begins the whole run anew; removing the "
            "folder and --resume, this stage alone"
        )


def summarise(jobs: list[Job], outcomes: dict[str, RunOutcome]) -> str | None:
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
