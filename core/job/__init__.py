"""From a configuration's tables to jobs: everything resolved, every problem found, nothing started."""

from __future__ import annotations

from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch

from hybridflow.core.algorithm import Algorithm, Role
from hybridflow.core.config import Provenance, merge, structure
from hybridflow.core.data import DataConfig
from hybridflow.core.data.tokenizer import TokenizerConfig
from hybridflow.core.environment import EnvironmentSection, environment_class
from hybridflow.core.errors import ConfigError, HybridFlowError
from hybridflow.core.job.checks import cross_checks
from hybridflow.core.job.reader import DEFAULT_PLUGINS, Reader, salvage
from hybridflow.core.job.roles import PlacedModel, Rewards, RoleResolver
from hybridflow.core.job.schema import PlacementSection, RunSection, SamplingSection, ValidationSection
from hybridflow.core.job.stages import STAGE, shadowed_overrides, stage_tables, tokenizer_folder
from hybridflow.core.rollout import SamplingParams
from hybridflow.core.runtime import ResourcePool
from hybridflow.core.workers.tasks import RewardPart

__all__ = ["STAGE", "Job", "PlacedModel", "Rewards", "resolve_jobs", "stage_tables"]


@attrs.frozen
class Job:
    """One algorithm's run (a stage of a configuration, or all of it)."""

    name: str
    stage: str | None
    folder: Path
    run: RunSection
    algorithm_name: str
    algorithm: Algorithm
    runtime: str
    runtime_config: Any
    pools: dict[str, ResourcePool]
    placement: PlacementSection
    models: dict[str, PlacedModel]
    scorers: dict[str, Rewards]
    """Roles that score by functions."""
    data: DataConfig
    more_data: dict[str, DataConfig]
    """Further data sets that the algorithm asks for."""
    environment: EnvironmentSection | None
    validation: ValidationSection | None
    validation_data: DataConfig | None
    tokenizer: TokenizerConfig
    tokenizer_path: str | None
    sampling: SamplingParams
    device: str
    tables: dict[str, Any]
    """What it was made of."""
    unused: tuple[str, ...] = ()
    """Tables of roles that this algorithm does not have."""
    follows: bool = False
    """Whether its models are of an earlier stage."""

    @property
    def main_pool(self) -> str:
        """Where data, rewards and numerical work live: the actor's pool, or the first."""
        return self.models["actor"].pool if "actor" in self.models else next(iter(self.pools))

    @property
    def rewards(self) -> tuple[RewardPart, ...]:
        """The parts of `reward`, or of the first role that scores by functions."""
        return next((s.parts for s in (self.scorers.get("reward"), *self.scorers.values()) if s), ())


def resolve_jobs(
    tables: dict[str, Any], name: str, shorthand: frozenset[str], provenance: Provenance | None = None,
    elsewhere: bool = False, unplaced: Container[str | None] = (),
) -> list[Job]:  # fmt: skip
    """The jobs of a configuration, in order. Raises ConfigError with all problems of all stages; with `elsewhere` plugins
    whose requirements are not installed here are none. `unplaced`: stages whose layouts are still to be found."""
    problems = [] if provenance is None else shadowed_overrides(tables, provenance)
    readers = {
        stage: Reader(own, elsewhere, stage in unplaced) for stage, own in stage_tables(tables, shorthand).items()
    }
    chosen = {stage: reader.algorithm() for stage, reader in readers.items()}
    algorithms = [algorithm for _, algorithm in chosen.values() if algorithm]
    roles = {role.name for algorithm in algorithms for role in algorithm.roles()}
    roles |= {name for algorithm in algorithms for name in algorithm.data_sets}
    jobs: dict[str, Job | None] = {}
    for stage, reader in readers.items():
        reader.unknown_tables(roles, all_known=all(algorithm for _, algorithm in chosen.values()))
        job = resolve_job(reader, name, stage, *chosen[stage], earlier=jobs)
        prefix = f"stage {stage}: " if stage else ""
        problems += [prefix + problem for problem in dict.fromkeys(reader.problems)]
        jobs[stage or name] = None if reader.problems else job
    if problems:
        raise ConfigError(_common(problems, [f"stage {stage}: " for stage in readers if stage]))
    return [job for job in jobs.values() if job is not None]


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
    more_data = {n: reader.section(n, DataConfig) for n in (algorithm.data_sets if algorithm else ())}
    checked: list[tuple[Any, str]] = [(data, "data"), (tokenizer, "tokenizer"), (validation_data, "validation")]
    for config, section in (*checked, *((c, n) for n, c in more_data.items())):
        if config is not None and (found := config.problems()):
            reader.fail(section, *found)
    runtime_table = {"name": DEFAULT_PLUGINS["runtime"], **reader.tables.get("runtime", {})}
    runtime = reader.plugin("runtime", runtime_table, "runtime")
    if runtime is None or not runtime.good:
        reader.failed.add("runtime")
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
    own_tokenizer = tokenizer != TokenizerConfig(vocab_size=tokenizer.vocab_size)
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
        placement=reader.section("placement", PlacementSection),
        models=resolver.models,
        scorers=resolver.scorers,
        data=data,
        more_data=more_data,
        environment=_environment(reader),
        validation=validation,
        validation_data=validation_data,
        tokenizer=TokenizerConfig() if follows else tokenizer,  # a model and its tokenizer belong together
        tokenizer_path=tokenizer_path if follows or not own_tokenizer else None,
        sampling=sampling.params(),
        device=("cuda" if torch.cuda.is_available() else "cpu") if run.device == "auto" else run.device,
        tables=reader.tables,
        unused=tuple(unused),
        follows=follows,
    )
    machine = {"runtime"} if reader.elsewhere else set()  # what this machine has says nothing of another
    reader.problems += cross_checks(job, reader.failed | machine)
    return job


def _environment(reader: Reader) -> EnvironmentSection | None:
    if "environment" not in reader.tables:
        return None
    section, problems = salvage(reader.tables["environment"], EnvironmentSection, "environment")
    if section is not None and not problems:
        try:
            environment_class(section.name, section.options)
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
    data = structure({**merge(base, section.data), "shuffle": False}, DataConfig, "validation.data", problems)
    own = [p for p in problems if p.removeprefix("validation.data.").partition(":")[0].split(".")[0] in section.data]
    reader.problems += own  # what is wrong with [data] is said there
    if data is None:
        reader.failed.add("validation")
    return section, data
