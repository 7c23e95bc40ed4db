"""A run that places itself (`placement = "auto"`), and a check that what is placed by hand fits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridflow.core.config import Provenance
from hybridflow.core.errors import ConfigError
from hybridflow.core.job import Job, resolve_jobs
from hybridflow.core.mapping.cluster import Cluster, read_cluster
from hybridflow.core.mapping.job import as_written, plannable, settings
from hybridflow.core.mapping.search import NothingFitsError, describe, plan_mapping

SOURCE = "placement"
"""Where `hybridflow show` says that such values came from."""


def resolve_placed(
    tables: dict[str, Any], name: str, shorthand: frozenset[str], provenance: Provenance | None = None
) -> list[Job]:
    """The jobs of a configuration, placed by the planner where it says so. Raises ConfigError with all problems; of a config
    that names its cluster and does not fit there: the phase, the numbers, and the nearest placement that fits."""
    jobs = resolve_jobs(tables, name, shorthand, provenance)
    problems: list[str] = []
    found: dict[str | None, dict[str, Any]] = {}
    for job in jobs:
        section = job.placement
        prefix = f"stage {job.stage}: " if job.stage else ""
        if section.cluster is None:
            if section.name == "auto":
                given = '{ name = "auto", cluster = "a100-80gb:2x8" }'
                problems.append(f"{prefix}placement: auto needs placement.cluster, as {given}; see docs/mapping.md")
            continue
        cluster = read_cluster(section.cluster)
        try:
            if section.name == "auto":
                work = plannable(job)
                found[job.stage] = settings(plan_mapping(cluster, work.workload, work.models, alternatives=0), cluster)
            else:
                problems += [prefix + problem for problem in _misfits(job, cluster)]
        except ConfigError as error:
            problems += [f"{prefix}placement: {problem}" for problem in error.problems]
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    if not found:
        return jobs
    return resolve_jobs(_with(tables, found, provenance), name, shorthand, provenance)


def _misfits(job: Job, cluster: Cluster) -> list[str]:
    work = plannable(job)
    written = as_written(job, work, cluster)
    if not isinstance(written, str):
        return []
    try:
        best = plan_mapping(cluster, work.workload, work.models, alternatives=0)
        fits = f'this fits: {describe(best)} (`hybridflow plan` writes it; placement = "auto" takes it)'
    except NothingFitsError as error:
        fits = f"nothing fits: {error.problems[0]}"
    return [f"placement: the config does not fit its cluster: {written}; {fits}"]


def _with(
    tables: dict[str, Any], found: Mapping[str | None, dict[str, Any]], provenance: Provenance | None
) -> dict[str, Any]:
    """`tables` with what was found in place of their own pools and layouts."""
    made = dict(tables)
    if None not in found:
        made["stages"] = dict(made["stages"])
        if set(found) == set(made["stages"]):
            made.pop("pools", None)  # each stage has its own
    for stage, settled in found.items():
        place = made if stage is None else dict(made["stages"].get(stage, {}))
        for role, table in settled.items():
            own = place.get(role, {})
            place[role] = table if role == "pools" else {**(own if isinstance(own, Mapping) else {}), **table}
        if stage is not None:
            made["stages"][stage] = place
        if provenance is not None:
            provenance.record(settled if stage is None else {"stages": {stage: settled}}, SOURCE)
    return made
