"""Turns the tables of a configuration into jobs. Every problem is found, and nothing is started.

    file, overrides --- core.config.read_config ---> tables
                                                       |
         stage_tables: the common tables with those of each run stage on top
                                                       |
                  +------------------------------------+------------+
                  v                                                 v
          Reader of [stages.A]                              Reader of [stages.B]
                  |  section, plugin, pools: settings and plugins   |
                  |  RoleResolver: a PlacedModel or Rewards each    |
                  |  cross_checks: what cannot work together        |
                  v                                                 v
                Job A ------- `earlier`: "stage:A" in B ---------> Job B
                  |                                                 |
                  +------------------ a problem anywhere -----------+--> ConfigError

A stage with `placement = "auto"` is resolved twice: without pools and layouts for the planner, then
with those that the planner has found.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from hybridflow.core.contracts.algorithm import Algorithm
from hybridflow.core.contracts.data_source import DataConfig
from hybridflow.core.contracts.role import Role
from hybridflow.core.contracts.runtime import ResourcePool
from hybridflow.core.contracts.tokenizer import TokenizerConfig
from hybridflow.core.data.rows import data_problems
from hybridflow.core.errors import ConfigError, HybridFlowError
from hybridflow.core.job.job import Chosen, Job
from hybridflow.core.job.sections import (
    EnvironmentSection,
    PlacementSection,
    RunSection,
    ValidationSection,
)
from hybridflow.core.plugins import registry
from hybridflow.core.plugins.resolve import make_environment
from hybridflow.settle.checks import cross_checks
from hybridflow.settle.config.load import merge
from hybridflow.settle.config.structure import Problem, structure
from hybridflow.settle.reader import Choice, Reader, first_keys, salvage, sentences
from hybridflow.settle.roles import RoleResolver
from hybridflow.settle.schema import SamplingSection
from hybridflow.settle.stages import stage_tables, tokenizer_folder


def resolve_jobs(
    tables: dict[str, Any],
    name: str,
    problems: Sequence[str] = (),
    elsewhere: bool = False,
    unplaced: Container[str | None] = (),
) -> list[Job]:
    """Resolve a configuration into its jobs, one for each run stage, in order.

    `problems` are those that the caller knows already. With `elsewhere` the jobs will run on
    another machine, and a plugin may lack its requirements here. `unplaced` are the stages whose
    pools and layouts are not decided yet.

    Raises ConfigError with the problems of all stages.
    """
    # Algorithms come first: their roles say which tables there are.
    readers = {
        stage: Reader(own, elsewhere, stage in unplaced)
        for stage, own in stage_tables(tables).items()
    }
    chosen = {stage: reader.algorithm() for stage, reader in readers.items()}

    # A table is known when any stage's algorithm has such a role or data set.
    algorithms = [algorithm for _, algorithm in chosen.values() if algorithm]
    roles: set[str] = set()
    for algorithm in algorithms:
        roles |= {role.name for role in algorithm.roles()}
        roles.update(algorithm.data_sets)

    jobs: dict[str, Job | None] = {}
    found: dict[str | None, list[Problem]] = {}
    for stage, reader in readers.items():
        reader.unknown_tables(roles, all_known=len(algorithms) == len(chosen))
        job = resolve_job(reader, name, stage, *chosen[stage], earlier=jobs)

        found[stage] = reader.problems
        jobs[stage or name] = None if reader.problems else job

    # All stages are read before anything is reported, so that one run shows every problem.
    if sentences := [*problems, *told(found)]:
        raise ConfigError(sentences)
    return [job for job in jobs.values() if job is not None]


def told(found: Mapping[str | None, list[Problem]]) -> list[str]:
    """Return the problems of all stages as sentences, each once.

    A problem that every one of several stages has lies in the tables that they share: its sentence
    names no stage.
    """
    every = [set(problems) for problems in found.values()]
    shared = set.intersection(*every) if len(every) > 1 else set()
    # A dict as an ordered set.
    told: dict[str, None] = {}
    for stage, problems in found.items():
        for problem in problems:
            prefix = f"stage {stage}: " if stage and problem not in shared else ""
            told[f"{prefix}{problem}"] = None
    return list(told)


def resolve_job(
    reader: Reader,
    name: str,
    stage: str | None,
    algorithm_name: str,
    algorithm: Algorithm | None,
    earlier: Mapping[str, Job | None],
) -> Job | None:
    """Resolve one stage into its job; None without an algorithm.

    Problems go to the reader. A job whose reader has problems only serves to find more of them.
    `earlier` are the jobs of the stages before this one, None for those with problems.
    """
    # The sections, each separately.
    run = reader.section("run", RunSection)
    sampling = reader.section("sampling", SamplingSection)
    data = _seeded(reader.section("data", DataConfig), run.seed)
    tokenizer = reader.section("tokenizer", TokenizerConfig)
    validation, validation_data = _validation(reader, run.seed)
    data_sets = algorithm.data_sets if algorithm else ()
    more_data = {key: _seeded(reader.section(key, DataConfig), run.seed) for key in data_sets}
    texts = {"data": data, "tokenizer": tokenizer, "validation": validation_data}
    _check_texts(reader, {**texts, **more_data})

    # If bad settings were replaced by defaults, contradictions with those would mislead.
    if algorithm is not None and not {"algorithm", "sampling"} & reader.failed:
        try:
            problems = algorithm.problems(sampling.params())
        except (ValueError, HybridFlowError) as error:  # a size that its own parts refuse
            problems = sentences(error)
            reader.failed.add("algorithm")
            algorithm = None
        reader.note("algorithm", *problems)

    # The plugins, and the placement of the models.
    runtime = reader.plugin("runtime", reader.tables.get("runtime", {}), "runtime")
    if runtime is None or not runtime.good:
        reader.failed.add("runtime")
    placement = reader.section("placement", PlacementSection)
    planner = _planner(reader, placement)
    pools = reader.pools()

    if run.replay is not None and validation is not None and validation.generate:
        validation = validation_data = None
    validates = validation is not None and validation.generate
    roles = _roles(reader, algorithm, validates)
    unused = reader.unused_roles({role.name for role in roles} | {*more_data})
    if algorithm is None:
        return None

    each = algorithm.updates_per_step()
    updates = None if each is None else each * run.steps
    prompts = [one.max_prompt_tokens for one in (data, validation_data) if one is not None]
    tokens = max(prompts) + sampling.max_tokens if all(prompts) else None
    resolver = RoleResolver(reader, pools, run, sampling, earlier, updates, tokens)
    for role in roles:
        generates = role.generates or (validates and role.name == "actor")
        resolver.resolve(role, generates and run.replay is None)

    # A model and its tokenizer belong together: the one of an earlier stage is taken over.
    tokenizer_path, follows = tokenizer_folder(reader.tables, earlier)
    if follows:
        tokenizer = TokenizerConfig(tokenizer.name)

    folder = Path(run.folder) / (run.name or name)
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
        tokenizer=tokenizer,
        tokenizer_path=tokenizer_path if not tokenizer.given else None,
        sampling=sampling.params(),
        device=reader.device,
        tables=reader.tables,
        unused=tuple(unused),
        follows=follows,
    )
    job = _with_pool_for_rows(job) if run.replay is None else _without_pools_of_engines(job, reader)
    # The devices of this machine say nothing about another one.
    machine = {"runtime"} if reader.elsewhere else set()
    reader.problems += cross_checks(job, reader.failed | machine)
    return job


def _with_pool_for_rows(job: Job) -> Job:
    """Return the job with a process for its data, where engines never stop.

    Responses that are complete leave them for it at once, and it must not wait for an engine.
    """
    if not job.carried_apart or any(pool.device == "cpu" for pool in job.pools.values()):
        return job
    name = next(name for name in ("cpu", "cpu-2", "cpu-3") if name not in job.pools)
    pool = ResourcePool(name, (1,), "cpu")
    return attrs.evolve(job, pools={**job.pools, name: pool})


def _without_pools_of_engines(job: Job, reader: Reader) -> Job:
    """Return the job without the pools that only engines would be in."""
    apart = {
        table["generation"].get("pool")
        for table in reader.tables.values()
        if isinstance(table, Mapping) and isinstance(table.get("generation"), Mapping)
    }
    used: set[str | None] = {model.pool for model in job.models.values()}
    used |= {scorer.pool for scorer in job.scorers.values()} | {job.main_pool}
    pools = {name: pool for name, pool in job.pools.items() if name in used or name not in apart}
    return attrs.evolve(job, pools=pools)


def _seeded(data: DataConfig, seed: int) -> DataConfig:
    """Return a data set's settings with the run's seed, unless they give one."""
    return data if data.seed is not None else attrs.evolve(data, seed=seed)


def _check_texts(reader: Reader, configs: Mapping[str, Any]) -> None:
    """Note contradictions inside each DataConfig or TokenizerConfig, by section name."""
    for section, config in configs.items():
        if config is None:
            continue
        own = config.problems() if isinstance(config, TokenizerConfig) else data_problems(config)
        if own:
            reader.fail(section, *(Problem("", text) for text in own))


def _roles(reader: Reader, algorithm: Algorithm | None, validates: bool) -> list[Role]:
    """List the algorithm's roles, and a reward where only validation needs it to score.

    A reward that is given as a string becomes a table with that function.
    """
    roles = list(algorithm.roles()) if algorithm else []
    if validates and not any(r.kind == "reward" for r in roles) and "reward" in reader.tables:
        roles.append(Role("reward", "reward"))

    # `reward = "NAME"` is short for a table.
    for role in roles:
        table = reader.tables.get(role.name)
        if role.kind == "reward" and isinstance(table, str):
            reader.tables[role.name] = {"function": table}
    return roles


def _planner(reader: Reader, placement: PlacementSection) -> Choice | None:
    """Choose the planner; None where none is installed and the configuration names none."""
    if placement.planner or registry().names("planner"):
        return reader.plugin("planner", placement.planner, "placement.planner")
    return None


def _trackers(reader: Reader, run: RunSection) -> tuple[Chosen, ...]:
    """Check the trackers' settings. The run leaves out those that are not installed."""
    specs = []
    for index, setting in enumerate(run.trackers):
        table = {"name": setting} if isinstance(setting, str) else setting
        path = "run.trackers" if isinstance(setting, str) else f"run.trackers.{index}"

        if not isinstance(table.get("name"), str):
            names = ", ".join(registry().names("tracker"))
            reader.fail("run", Problem(path, f"give the name of a tracker ({names})"))
            continue
        try:
            missing = registry().descriptor("tracker", table["name"]).missing()
        except HybridFlowError as error:
            reader.fail("run", Problem(path, str(error)))
            continue

        # Settings of a tracker that is not installed cannot be checked.
        if missing:
            specs.append(Chosen(table["name"]))
        elif choice := reader.plugin("tracker", table, path):
            specs.append(Chosen(choice.name, choice.config))
    return tuple(specs)


def _environment(reader: Reader) -> EnvironmentSection | None:
    """Read [environment], and check its options by making one; None without the table."""
    if "environment" not in reader.tables:
        return None
    section, problems = salvage(reader.tables["environment"], EnvironmentSection)

    if section is not None and not problems:
        try:
            make_environment(section.name, section.options)
        except HybridFlowError as error:
            problems = [Problem("", text) for text in sentences(error)]
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            problems = [Problem("options", f"the environment cannot be made of them ({why})")]
    if problems:
        reader.fail("environment", *(problem.inside("environment") for problem in problems))
    return section


def _validation(reader: Reader, seed: int) -> tuple[ValidationSection | None, DataConfig | None]:
    """Read [validation] and its data set: [data], with validation.data on top, in file order."""
    if "validation" not in reader.tables:
        return None, None
    section = reader.section("validation", ValidationSection)
    table = merge(reader.tables.get("data", {}), section.data) | {"shuffle": False}
    problems: list[Problem] = []
    data = structure(table, DataConfig, problems=problems)

    # Problems of [data] are reported there; here only those of [validation.data] itself.
    for problem in problems:
        if first_keys([problem]) <= section.data.keys():
            reader.problems.append(problem.inside("validation.data"))
    if data is None:
        reader.failed.add("validation")
        return section, None
    return section, _seeded(data, seed)
