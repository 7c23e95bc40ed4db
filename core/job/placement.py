"""A configuration's jobs with their places: by hand, or found by the planner that it names."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from hybridflow.core.config.load import Provenance
from hybridflow.core.contracts.planner import NotPlanned, Planner
from hybridflow.core.errors import ConfigError
from hybridflow.core.job.job import Job
from hybridflow.core.job.places import forget_places, says_auto
from hybridflow.core.job.resolve import resolve_jobs
from hybridflow.core.job.stages import shadowed_overrides, stage_tables
from hybridflow.core.plugins import registry

log = logging.getLogger(__name__)
PLACED = "placement"
"""Where `hybridflow show` says that such values came from."""


def resolve_placed(
    tables: dict[str, Any],
    name: str,
    shorthand: frozenset[str],
    provenance: Provenance | None = None,
) -> list[Job]:
    """The jobs of a configuration, placed by the planner where it says so.

    Raises ConfigError with all problems; of a config that names its cluster and does not fit there: the phase, the numbers,
    and the nearest placement that fits.
    """
    every, auto = without_places(tables, shorthand)
    shadowed = shadowed_overrides(tables, provenance) if provenance is not None else []

    def found(job: Job) -> Mapping[str, Any]:
        settings = place(job)
        if provenance is not None:
            own = {key: dict(value) for key, value in settings.items()}
            provenance.record(own if job.stage is None else {"stages": {job.stage: own}}, PLACED)
        return settings

    given = whole(every) if auto else tables
    jobs = resolve_jobs(given, name, shorthand, problems=shadowed, unplaced=auto, place=found)
    problems = [problem for job in jobs if job.stage not in auto for problem in misfits(job)]
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return jobs


def without_places(
    tables: Mapping[str, Any], shorthand: frozenset[str]
) -> tuple[dict[str | None, dict[str, Any]], list[str | None]]:
    """(tables of each stage, the stages that say placement = "auto"): these without pools and sizes."""
    every = {stage: deepcopy(dict(own)) for stage, own in stage_tables(tables, shorthand).items()}
    auto = [stage for stage, own in every.items() if says_auto(own)]
    for stage in auto:
        forget_places(every[stage])
    return every, auto


def whole(every: dict[str | None, dict[str, Any]]) -> dict[str, Any]:
    """The tables of a file whose stages say everything themselves."""
    return every.get(None, {"stages": every})


def planner_of(job: Job) -> Planner:
    """The planner that a job names. Raises ConfigError where none is installed."""
    if not job.planner:
        raise ConfigError("placement.planner: no planner is installed")
    planner_class: type[Planner] = registry().get("planner", job.planner)
    return planner_class(job.planner_config)


def place(job: Job) -> Mapping[str, Any]:
    """The settings of the best placement. Raises HybridFlowError: no cluster, or nothing fits."""
    if job.placement.cluster is None:
        given = '{ name = "auto", cluster = "a100-80gb:2x8" }'
        raise ConfigError(f"auto needs placement.cluster, as {given}; see docs/mapping.md")
    return planner_of(job).plan(job, job.placement.cluster, alternatives=0).settings


def misfits(job: Job) -> list[str]:
    """Why it does not fit the cluster that it names; nothing where it names none, or cannot be planned."""
    if job.placement.cluster is None:
        return []
    prefix = f"stage {job.stage}: " if job.stage else ""
    try:
        return [
            f"{prefix}placement: {problem}"
            for problem in planner_of(job).problems(job, job.placement.cluster)
        ]
    except NotPlanned as error:
        log.warning("%splacement: whether it fits is not known: %s", prefix, error)
        return []
