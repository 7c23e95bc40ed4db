"""Resolves a configuration into placed jobs: by its own pools and layouts, or by a planner's."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from hybridflow.core.contracts.planner import NotPlanned, Planner
from hybridflow.core.errors import ConfigError, HybridFlowError
from hybridflow.core.job.job import Job
from hybridflow.core.plugins.resolve import build_planner
from hybridflow.settle.config.load import Provenance
from hybridflow.settle.config.structure import Problem
from hybridflow.settle.places import forget_places, replace_places, says_auto
from hybridflow.settle.reader import sentences
from hybridflow.settle.resolve import resolve_jobs, told
from hybridflow.settle.stages import shadowed_overrides, stage_tables

log = logging.getLogger(__name__)
PLACED = "placement"
"""The source that `hybridflow show` prints for a planner's values."""


def resolve_placed(
    tables: dict[str, Any],
    name: str,
    provenance: Provenance | None = None,
) -> list[Job]:
    """Resolve a configuration into jobs, and place those that say placement = "auto".

    `provenance` records which values came from the planner. Raises ConfigError with all problems.
    For a job that does not fit on the cluster that it names, the problems state the phase, the
    bytes, and the nearest placement that fits.
    """
    every, auto = without_places(tables)
    shadowed = shadowed_overrides(tables, provenance) if provenance is not None else []
    # With placed stages, each stage gets tables of its own, as plans differ between stages.
    unplaced = whole(every) if auto else tables
    jobs = resolve_jobs(unplaced, name, problems=shadowed, unplaced=auto)

    # A plan is written into the tables, which are then resolved as if it were written by hand.
    found: dict[str | None, list[Problem]] = {}
    for job in jobs:
        if job.stage not in auto:
            continue
        try:
            settings = place(job)
        except HybridFlowError as error:
            found[job.stage] = [Problem("placement", text) for text in sentences(error)]
            continue
        replace_places(every[job.stage], settings)
        # The planner's values are recorded as such, for `hybridflow show`.
        if provenance is not None:
            own = {key: dict(value) for key, value in settings.items()}
            provenance.record(own if job.stage is None else {"stages": {job.stage: own}}, PLACED)
    if auto and not found:
        jobs = resolve_jobs(whole(every), name)

    # A planner's own placement fits; one by hand is checked against its cluster.
    problems = dict.fromkeys(told(found))
    for job in jobs:
        if job.stage not in auto:
            problems |= dict.fromkeys(misfits(job))
    if problems:
        raise ConfigError(list(problems))
    return jobs


def without_places(
    tables: Mapping[str, Any],
) -> tuple[dict[str | None, dict[str, Any]], list[str | None]]:
    """Drop the pools and sizes of the stages that have placement = "auto".

    Returns (the tables of every stage, the names of those stages).
    """
    # Copies, since forget_places changes its argument.
    stages = stage_tables(tables)
    every = {stage: deepcopy(dict(own)) for stage, own in stages.items()}
    auto = [stage for stage, own in every.items() if says_auto(own)]
    for stage in auto:
        forget_places(every[stage])
    return every, auto


def whole(every: dict[str | None, dict[str, Any]]) -> dict[str, Any]:
    """Return the tables of one file with these stages and without common tables."""
    return every.get(None, {"stages": every})


def planner_of(job: Job) -> Planner:
    """Make the planner that a job names. Raises ConfigError where none is installed."""
    return build_planner(job.planner, job.planner_config)


def place(job: Job) -> Mapping[str, Any]:
    """Plan the job's best placement, and return its settings.

    Raises HybridFlowError where no cluster is named, or no placement fits on it.
    """
    # A plan is for one cluster, with its devices and links.
    if job.placement.cluster is None:
        example = '{ name = "auto", cluster = "a100-80gb:2x8" }'
        raise ConfigError(f"auto needs placement.cluster, as {example}; see docs/mapping.md")
    return planner_of(job).plan(job, job.placement.cluster, alternatives=0).settings


def misfits(job: Job) -> list[str]:
    """List why a job does not fit on the cluster that it names.

    [] where it names none, or where the planner cannot judge it, which is logged.
    """
    if job.placement.cluster is None:
        return []
    prefix = f"stage {job.stage}: " if job.stage else ""
    # A planner without a cost model of this job cannot check it; the run starts unchecked.
    try:
        problems = planner_of(job).problems(job, job.placement.cluster)
        return [f"{prefix}placement: {problem}" for problem in problems]
    except NotPlanned as error:
        log.warning("%splacement: whether it fits is not known: %s", prefix, error)
        return []
