"""A run that places itself (`placement = "auto"`), and a check that what is placed by hand fits."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from hybridflow.core.config import Provenance
from hybridflow.core.errors import ConfigError, HybridFlowError
from hybridflow.core.job import Job, resolve_jobs, stage_tables
from hybridflow.core.job.stages import shadowed_overrides
from hybridflow.core.mapping.cluster import read_cluster
from hybridflow.core.mapping.job import (
    Misfit,
    as_written,
    check_ranks,
    forget_places,
    plannable,
    replace_places,
    settings,
)
from hybridflow.core.mapping.search import NothingFitsError, describe, plan_mapping

log = logging.getLogger(__name__)
SOURCE = "placement"
"""Where `hybridflow show` says that such values came from."""


def resolve_placed(
    tables: dict[str, Any], name: str, shorthand: frozenset[str], provenance: Provenance | None = None
) -> list[Job]:
    """The jobs of a configuration, placed by the planner where it says so. Raises ConfigError with all problems; of a config
    that names its cluster and does not fit there: the phase, the numbers, and the nearest placement that fits."""
    every, auto = without_places(tables, shorthand)
    if not auto:
        jobs = resolve_jobs(tables, name, shorthand, provenance)
        problems = [p for job in jobs for p in _misfits(job)]
        if problems:
            raise ConfigError(list(dict.fromkeys(problems)))
        return jobs
    problems = shadowed_overrides(tables, provenance) if provenance else []
    for job in resolve_jobs(whole(every), name, shorthand, unplaced=auto):
        if job.stage not in auto:
            problems += _misfits(job)
            continue
        prefix = _prefix(job)
        if job.placement.cluster is None:
            given = '{ name = "auto", cluster = "a100-80gb:2x8" }'
            problems.append(f"{prefix}placement: auto needs placement.cluster, as {given}; see docs/mapping.md")
            continue
        try:
            cluster, work = read_cluster(job.placement.cluster), plannable(job)
            check_ranks(job, cluster)
            settled = settings(plan_mapping(cluster, work.workload, work.models, alternatives=0), cluster)
        except HybridFlowError as error:
            said = error.problems if isinstance(error, ConfigError) else [str(error)]
            problems += [f"{prefix}placement: {problem}" for problem in said]
            continue
        replace_places(every[job.stage], settled)
        if provenance is not None:
            provenance.record(settled if job.stage is None else {"stages": {job.stage: settled}}, SOURCE)
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return resolve_jobs(whole(every), name, shorthand)


def without_places(
    tables: Mapping[str, Any], shorthand: frozenset[str]
) -> tuple[dict[str | None, dict[str, Any]], list[str | None]]:
    """(tables of each stage, the stages that say placement = "auto"): these without pools and sizes."""
    every = {stage: deepcopy(dict(own)) for stage, own in stage_tables(tables, shorthand).items()}
    auto = [stage for stage, own in every.items() if _says_auto(own)]
    for stage in auto:
        forget_places(every[stage])
    return every, auto


def _says_auto(own: Mapping[str, Any]) -> bool:
    section = own.get("placement")
    return isinstance(section, Mapping) and section.get("name") == "auto"


def whole(every: dict[str | None, dict[str, Any]]) -> dict[str, Any]:
    """The tables of a file whose stages say everything themselves."""
    return every.get(None, {"stages": every})


def _prefix(job: Job) -> str:
    return f"stage {job.stage}: " if job.stage else ""


def _misfits(job: Job) -> list[str]:
    """Why it does not fit the cluster that it names; nothing where it names none, or cannot be planned."""
    if job.placement.cluster is None:
        return []
    cluster = read_cluster(job.placement.cluster)
    try:
        work = plannable(job)
    except HybridFlowError as error:
        log.warning("%splacement: whether it fits is not known: %s", _prefix(job), error)
        return []
    written = as_written(job, work, cluster)
    if not isinstance(written, Misfit):
        return []
    try:
        best = plan_mapping(cluster, work.workload, work.models, alternatives=0)
        fits = f'this fits: {describe(best)} (`hybridflow plan` writes it; placement = "auto" takes it)'
    except NothingFitsError as error:
        fits = f"nothing fits: {error.problems[0]}"
    return [f"{_prefix(job)}placement: the config does not fit its cluster: {written.why}; {fits}"]
