"""From a configuration's tables to jobs: everything resolved, every problem found, nothing started."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

from hybridflow.core.config.load import merge
from hybridflow.core.config.structure import structure
from hybridflow.core.contracts.algorithm import Algorithm
from hybridflow.core.contracts.data_source import DataConfig
from hybridflow.core.contracts.role import Role
from hybridflow.core.contracts.runtime import ResourcePool
from hybridflow.core.contracts.tokenizer import TokenizerConfig
from hybridflow.core.data.rows import data_problems
from hybridflow.core.errors import ConfigError, HybridFlowError
from hybridflow.core.job.checks import cross_checks
from hybridflow.core.job.job import Job, TrackerSpec
from hybridflow.core.job.places import replace_places
from hybridflow.core.job.reader import Choice, Reader, salvage
from hybridflow.core.job.roles import RoleResolver
from hybridflow.core.job.schema import (
    EnvironmentSection,
    PlacementSection,
    RunSection,
    SamplingSection,
    ValidationSection,
)
from hybridflow.core.job.stages import stage_tables, tokenizer_folder
from hybridflow.core.plugins import registry
from hybridflow.core.plugins.resolve import environment_class

Place = Callable[[Job], Mapping[str, Any]]
"""From a job without places to the settings of a plan (core/contracts/planner.py)."""


def resolve_jobs(
    tables: dict[str, Any], name: str, shorthand: frozenset[str], problems: Sequence[str] = (),
    elsewhere: bool = False, unplaced: Container[str | None] = (), place: Place | None = None,
) -> list[Job]:  # fmt: skip
    """The jobs of a configuration, in order. Raises ConfigError with all problems of all stages.

    `problems` are known already. With `elsewhere` plugins whose requirements are not installed here are none. The layouts
    of `unplaced` stages are still to be found, by `place` where it is given.
    """
    problems = list(problems)
    readers = {
        stage: Reader(own, elsewhere, stage in unplaced)
        for stage, own in stage_tables(tables, shorthand).items()
    }
    chosen = {stage: reader.algorithm() for stage, reader in readers.items()}
    algorithms = [algorithm for _, algorithm in chosen.values() if algorithm]
    roles = {role.name for algorithm in algorithms for role in algorithm.roles()}
    roles |= {name for algorithm in algorithms for name in algorithm.data_sets}
    jobs: dict[str, Job | None] = {}
    for stage, reader in readers.items():
        reader.unknown_tables(roles, all_known=all(algorithm for _, algorithm in chosen.values()))
        job = resolve_job(reader, name, stage, *chosen[stage], earlier=jobs)
        if place is not None and stage in unplaced and job is not None and not reader.problems:
            reader = _placed(reader, job, place)
            if not reader.problems:
                job = resolve_job(reader, name, stage, *chosen[stage], earlier=jobs)
        prefix = f"stage {stage}: " if stage else ""
        problems += [prefix + problem for problem in dict.fromkeys(reader.problems)]
        jobs[stage or name] = None if reader.problems else job
    if problems:
        raise ConfigError(_common(problems, [f"stage {stage}: " for stage in readers if stage]))
    return [job for job in jobs.values() if job is not None]


def _placed(reader: Reader, job: Job, place: Place) -> Reader:
    """The same stage, with pools and layouts that were found; or with the problem why there are none."""
    try:
        settings = place(job)
    except HybridFlowError as error:
        said = error.problems if isinstance(error, ConfigError) else [str(error)]
        reader.problems += [f"placement: {problem}" for problem in said]
        return reader
    tables = deepcopy(reader.tables)
    replace_places(tables, settings)
    return Reader(tables, reader.elsewhere)


def _common(problems: list[str], prefixes: list[str]) -> list[str]:
    """A problem that all of several stages have is of what they share: said once, without a stage."""
    if len(prefixes) < 2:
        return problems
    said: dict[str, None] = {}
    for problem in problems:
        prefix = next((p for p in prefixes if problem.startswith(p)), "")
        bare = problem.removeprefix(prefix)
        said[bare if all(p + bare in problems for p in prefixes) else problem] = None
    return list(said)


def resolve_job(
    reader: Reader, name: str, stage: str | None, algorithm_name: str, algorithm: Algorithm | None,
    earlier: Mapping[str, Job | None],
) -> Job | None:  # fmt: skip
    """The job of one stage; with problems in the reader it is only good for finding more of them."""
    run = reader.section("run", RunSection)
    sampling = reader.section("sampling", SamplingSection)
    data = reader.section("data", DataConfig)
    tokenizer = reader.section("tokenizer", TokenizerConfig)
    validation, validation_data = _validation(reader)
    more_data = {
        n: reader.section(n, DataConfig) for n in (algorithm.data_sets if algorithm else ())
    }
    checked: list[tuple[Any, str]] = [
        (data, "data"),
        (tokenizer, "tokenizer"),
        (validation_data, "validation"),
    ]
    for config, section in (*checked, *((c, n) for n, c in more_data.items())):
        if config is None:
            continue
        found = config.problems() if isinstance(config, TokenizerConfig) else data_problems(config)
        if found:
            reader.fail(section, *found)
    runtime = reader.plugin("runtime", reader.tables.get("runtime", {}), "runtime")
    if runtime is None or not runtime.good:
        reader.failed.add("runtime")
    placement = reader.section("placement", PlacementSection)
    planner = _planner(reader, placement)
    pools = reader.pools()
    roles = list(algorithm.roles()) if algorithm else []
    validates = validation is not None and validation.generate
    if validates and not any(r.kind == "reward" for r in roles) and "reward" in reader.tables:
        roles.append(Role("reward", "reward"))  # validation scores by it
    for role in roles:
        own = reader.tables.get(role.name)
        if role.kind == "reward" and isinstance(own, str):
            reader.tables[role.name] = {"function": own}
    unused = reader.unused_roles({role.name for role in roles} | {*more_data})
    if algorithm is None:
        return None
    resolver = RoleResolver(reader, pools, sampling, earlier)
    for role in roles:
        resolver.resolve(role, generates=role.generates or (validates and role.name == "actor"))
    folder = Path(run.folder) / (run.name or name)
    tokenizer_path, follows = tokenizer_folder(reader.tables, earlier)
    job = Job(
        name=run.name or name,
        stage=stage,
        folder=folder / stage if stage else folder,
        run=run,
        algorithm_name=algorithm_name,
        algorithm=algorithm,
        runtime=runtime.name if runtime else "",
        runtime_config=runtime.config if runtime else None,
        pools=pools or {"main": ResourcePool("main")},
        placement=placement,
        planner=planner.name if planner else "",
        planner_config=planner.config if planner else None,
        trackers=_trackers(reader, run),
        models=resolver.models,
        scorers=resolver.scorers,
        data=data,
        more_data=more_data,
        environment=_environment(reader),
        validation=validation,
        validation_data=validation_data,
        tokenizer=TokenizerConfig(tokenizer.name)
        if follows
        else tokenizer,  # a model and its tokenizer belong together
        tokenizer_path=tokenizer_path if follows or not tokenizer.given else None,
        sampling=sampling.params(),
        device=("cuda" if torch.cuda.is_available() else "cpu")
        if run.device == "auto"
        else run.device,
        tables=reader.tables,
        unused=tuple(unused),
        follows=follows,
    )
    machine = (
        {"runtime"} if reader.elsewhere else set()
    )  # what this machine has says nothing of another
    reader.problems += cross_checks(job, reader.failed | machine)
    return job


def _planner(reader: Reader, placement: PlacementSection) -> Choice | None:
    """What plans this stage, where something is installed that can, or is asked for."""
    if placement.planner or registry().names("planner"):
        return reader.plugin("planner", placement.planner, "placement.planner")
    return None


def _trackers(reader: Reader, run: RunSection) -> tuple[TrackerSpec, ...]:
    """The trackers with settings that were checked; one that is not installed here is left out when the run begins."""
    found = []
    for at, given in enumerate(run.trackers):
        table = {"name": given} if isinstance(given, str) else given
        path = "run.trackers" if isinstance(given, str) else f"run.trackers.{at}"
        if not isinstance(table.get("name"), str):
            reader.fail(
                "run",
                f"{path}: give the name of a tracker ({', '.join(registry().names('tracker'))})",
            )
            continue
        try:
            missing = registry().descriptor("tracker", table["name"]).missing()
        except HybridFlowError as error:
            reader.fail("run", f"{path}: {error}")
            continue
        if missing:
            found.append(TrackerSpec(table["name"]))
        elif choice := reader.plugin("tracker", table, path):
            found.append(TrackerSpec(choice.name, choice.config))
    return tuple(found)


def _environment(reader: Reader) -> EnvironmentSection | None:
    if "environment" not in reader.tables:
        return None
    section, problems = salvage(reader.tables["environment"], EnvironmentSection, "environment")
    if section is not None and not problems:
        try:
            environment_class(section.name, section.options)
        except ConfigError as error:
            problems = [f"environment: {problem}" for problem in error.problems]
        except HybridFlowError as error:
            problems = [f"environment: {error}"]
    if problems:
        reader.fail("environment", *problems)
    return section


def _validation(reader: Reader) -> tuple[ValidationSection | None, DataConfig | None]:
    if "validation" not in reader.tables:
        return None, None
    section = reader.section("validation", ValidationSection)
    base = reader.tables.get("data", {})
    problems: list[str] = []
    data = structure(
        {**merge(base, section.data), "shuffle": False}, DataConfig, "validation.data", problems
    )
    own = [
        p
        for p in problems
        if p.removeprefix("validation.data.").partition(":")[0].split(".")[0] in section.data
    ]
    reader.problems += own  # what is wrong with [data] is said there
    if data is None:
        reader.failed.add("validation")
    return section, data
