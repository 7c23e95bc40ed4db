"""From a configuration's tables to a job: everything resolved, every problem found, nothing started."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import torch

from hybridflow.core.algorithm import Algorithm, Role
from hybridflow.core.config import structure
from hybridflow.core.config_load import merge
from hybridflow.core.data import DataConfig
from hybridflow.core.errors import ConfigError, HybridFlowError
from hybridflow.core.model import ModelConfig, ModelSpec, resolve_model
from hybridflow.core.model_worker import ModelRole
from hybridflow.core.names import did_you_mean
from hybridflow.core.parallel import ParallelLayout
from hybridflow.core.plugins import registry
from hybridflow.core.rollout import SamplingParams
from hybridflow.core.runtime import ResourcePool
from hybridflow.core.schema import USUAL_ROLES, RoleSection, RunSection, SamplingSection, ValidationSection
from hybridflow.core.tasks import RewardPart
from hybridflow.core.tokenizer import TokenizerConfig

SECTIONS = ("run", "runtime", "pools", "algorithm", "data", "tokenizer", "sampling", "rollout", "validation", "stages")
STAGE = "stage:"


@attrs.frozen
class PlacedModel:
    """A model role: what it runs, and where."""

    role: Role
    spec: ModelRole
    layout: ParallelLayout
    pool: str


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
    models: dict[str, PlacedModel]
    rewards: tuple[RewardPart, ...]
    reward_role: Role | None
    data: DataConfig
    validation: ValidationSection | None
    validation_data: DataConfig | None
    tokenizer: TokenizerConfig
    tokenizer_path: str | None
    sampling: SamplingParams
    device: str
    tables: dict[str, Any]

    @property
    def main_pool(self) -> str:
        """Where data, rewards and numerical work live: the actor's pool, or the first."""
        return self.models["actor"].pool if "actor" in self.models else next(iter(self.pools))


def stage_tables(tables: Mapping[str, Any], shorthand: frozenset[str]) -> dict[str | None, dict[str, Any]]:
    """The tables of each stage (its own over the common ones), in order; {None: tables} without stages."""
    stages = tables.get("stages") or {}
    if not isinstance(stages, Mapping) or not all(isinstance(s, Mapping) for s in stages.values()):
        raise ConfigError("stages: write one table per stage, for example [stages.warm-up]")
    common = {k: v for k, v in tables.items() if k != "stages"}
    if not stages:
        return {None: common}
    return {name: merge(common, over, shorthand) for name, over in stages.items()}


class Resolver:
    """Collects the problems of one stage's tables while it resolves them."""

    def __init__(self, tables: dict[str, Any], name: str, stage: str | None, earlier: Mapping[str, Job]):
        self.tables, self.name, self.stage, self.earlier = tables, name, stage, earlier
        self.problems: list[str] = []

    def job(self) -> Job | None:
        """The job, or None with `problems` filled."""
        run = self._section("run", RunSection)
        algorithm_name, algorithm = self._algorithm()
        runtime, runtime_config = self._plugin("runtime", self.tables.get("runtime", {"name": "ray"}), "runtime")
        sampling = self._section("sampling", SamplingSection)
        data = self._section("data", DataConfig)
        tokenizer = self._section("tokenizer", TokenizerConfig)
        validation, validation_data = self._validation()
        self._unknown_sections(algorithm)
        pools = self._pools()
        if None in (run, algorithm, sampling, data, tokenizer) or not pools:
            return None
        assert run and algorithm and sampling and data and tokenizer
        self.problems += [f"algorithm: {p}" for p in algorithm.problems()]
        self.problems += (
            data.problems() + tokenizer.problems() + (validation_data.problems() if validation_data else [])
        )
        device = self._device(run)
        wants_rollout = validation is not None and validation.generate
        params = SamplingParams(
            sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k, sampling.stop_tokens
        )
        models, rewards, reward_role = self._roles(algorithm, pools, params, wants_rollout)
        root = Path(run.folder) / (run.name or self.name)
        folder = root / self.stage if self.stage else root
        job = Job(
            run.name or self.name, self.stage, folder, run, algorithm_name, algorithm, runtime, runtime_config, pools, models,
            rewards, reward_role, data, validation, validation_data, tokenizer, self._tokenizer_path(tokenizer), params,
            device, self.tables,
        )  # fmt: skip
        self._cross_checks(job)
        return None if self.problems else job

    def _section(self, name: str, cls: type) -> Any:
        return structure(self.tables.get(name, {}), cls, name, self.problems)

    def _scoped(self, kind: str, table: Mapping[str, Any]) -> dict[str, Any]:
        """A table whose sub-tables may be meant for one plugin each: `[algorithm.ppo]` counts when name is ppo."""
        names = registry().names(kind)
        own = table.get(str(table.get("name")))
        rest = {k: v for k, v in table.items() if k not in names or not isinstance(v, Mapping)}
        return merge(rest, own) if isinstance(own, Mapping) else rest

    def _plugin(self, kind: str, table: Any, path: str) -> tuple[str, Any]:
        """(name, config instance or None) of a table with a `name`."""
        if not isinstance(table, Mapping) or not isinstance(table.get("name"), str):
            self.problems.append(f"{path}: give the name of a {kind} plugin ({', '.join(registry().names(kind))})")
            return "", None
        table = self._scoped(kind, table)
        name = table.pop("name")
        try:
            registry().get(kind, name)
            config_class = registry().config_class(kind, name)
        except HybridFlowError as error:
            self.problems.append(f"{path}: {error}")
            return name, None
        if config_class is None:
            self.problems += [f"{path}.{k}: unknown key; {kind} {name!r} has no settings" for k in table]
            return name, None
        return name, structure(table, config_class, path, self.problems)

    def _algorithm(self) -> tuple[str, Algorithm | None]:
        if "algorithm" not in self.tables:
            self.problems.append(f"algorithm: which one? There are {', '.join(registry().names('algorithm'))}")
            return "", None
        name, config = self._plugin("algorithm", self.tables["algorithm"], "algorithm")
        if config is None:
            return name, None
        return name, registry().get("algorithm", name)(config)

    def _validation(self) -> tuple[ValidationSection | None, DataConfig | None]:
        if "validation" not in self.tables:
            return None, None
        section = self._section("validation", ValidationSection)
        if section is None:
            return None, None
        table = merge(self.tables.get("data", {}), section.data)
        return section, structure({**table, "shuffle": False}, DataConfig, "validation.data", self.problems)

    def _unknown_sections(self, algorithm: Algorithm | None) -> None:
        roles = {r.name for r in algorithm.roles()} if algorithm else set()
        known = {*SECTIONS, *roles, *USUAL_ROLES}
        for key in self.tables:
            if key not in known:
                hint = did_you_mean(key, known, quote="`")
                self.problems.append(
                    f"{key}: unknown key{hint} (sections: {', '.join(SECTIONS)}; roles: {', '.join(sorted(roles))})"
                )

    def _pools(self) -> dict[str, ResourcePool]:
        table, pools = self.tables.get("pools", {"main": [1]}), {}
        if not isinstance(table, Mapping):
            self.problems.append(f"pools: expected a table of name = [devices per node, ...], got {table!r}")
            return {}
        for name, devices in table.items():
            devices = [devices] if isinstance(devices, int) and not isinstance(devices, bool) else devices
            good = isinstance(devices, list) and devices and all(type(d) is int and d > 0 for d in devices)
            if good:
                pools[name] = ResourcePool(name, tuple(devices))
            else:
                self.problems.append(f"pools.{name}: expected devices per node, for example [8, 8], got {devices!r}")
        return pools

    def _device(self, run: RunSection) -> str:
        cuda = torch.cuda.is_available()
        if run.device == "cuda" and not cuda and self.tables.get("runtime", {}).get("address") is None:
            self.problems.append("run.device: is cuda, and this machine has none that torch can use; set cpu or auto")
        return ("cuda" if cuda else "cpu") if run.device == "auto" else run.device

    # Roles
    def _roles(self, algorithm: Algorithm, pools, sampling: SamplingParams, wants_rollout: bool):
        models: dict[str, PlacedModel] = {}
        rewards: tuple[RewardPart, ...] = ()
        reward_role = None
        declared = list(algorithm.roles())
        if wants_rollout and not any(r.kind == "reward" for r in declared) and "reward" in self.tables:
            declared.append(Role("reward", "reward"))  # validation scores by it
        for role in declared:
            section = self._role_section(role)
            if section is None:
                continue
            if role.kind == "reward" and section.model == ModelConfig():
                rewards, reward_role = self._rewards(role, section), role
                continue
            placed = self._model(role, section, pools, sampling, wants_rollout)
            if placed is not None:
                models[role.name] = placed
        return models, rewards, reward_role

    def _role_section(self, role: Role) -> RoleSection | None:
        own = self.tables.get(role.name, {})
        if not isinstance(own, Mapping):
            self.problems.append(f"{role.name}: expected a table, got {own!r}")
            return None
        table = dict(own)
        if role.kind in ("policy", "value") and role.name != "actor":
            inherited = dict(self.tables.get("actor", {}))
            if "model" in own:  # another model, not the actor's with changes
                inherited.pop("model", None)
            table = merge(inherited, own)
        return structure(table, RoleSection, role.name, self.problems)

    def _rewards(self, role: Role, section: RoleSection) -> tuple[RewardPart, ...]:
        if (section.function is None) == (not section.parts):
            self.problems.append(
                f"{role.name}: give one of `function` (a plugin: {', '.join(registry().names('reward'))}, or "
                '"package.module:function"), `parts` (several), or `model`'
            )
            return ()
        if section.parts:
            parts = tuple(RewardPart(p.name, p.function, p.options, p.weight) for p in section.parts)
        else:
            label = str(section.function).rpartition(":")[2]
            parts = (RewardPart(label, str(section.function), section.options),)
        from hybridflow.core.rewards import reward_from

        for part in parts:
            try:
                reward_from(part.function, part.options)
            except HybridFlowError as error:
                self.problems.append(f"{role.name}: {error}")
        return parts

    def _model(self, role: Role, section: RoleSection, pools, sampling: SamplingParams, wants_rollout: bool):
        if section.pool not in pools:
            self.problems.append(
                f"{role.name}.pool: there is no pool {section.pool!r}{did_you_mean(section.pool, pools)} (pools: {', '.join(pools)})"
            )
            return None
        kind = "score" if role.kind == "reward" else role.kind
        spec = self._spec(section.model, kind, role.name)
        layout = self._layout(role.name, section, pools[section.pool])
        backend, config = self._plugin("training_backend", section.backend, f"{role.name}.backend")
        if spec is None or layout is None or config is None:
            return None
        found = registry().get("training_backend", backend).problems(config, layout, kind)
        self.problems += [f"{role.name}: {p}" for p in found]
        engine = engine_config = None
        if role.generates or (wants_rollout and role.name == "actor"):
            engine, engine_config = self._plugin(
                "rollout_engine", self.tables.get("rollout", {"name": "transformers"}), "rollout"
            )
        model = ModelRole(
            spec, backend, config, section.micro_batch_tokens, section.optimizer if role.trained else None, engine,
            engine_config, sampling.temperature or 1.0, section.offload,
        )  # fmt: skip
        return PlacedModel(role, model, layout, section.pool)

    def _spec(self, config: ModelConfig, kind: str, role: str) -> ModelSpec | None:
        try:
            if config.path is not None and config.path.startswith(STAGE):
                return self._from_stage(config, kind, role)
            return resolve_model(config, kind, role)
        except ConfigError as error:
            self.problems += error.problems
        except HybridFlowError as error:
            self.problems.append(str(error))
        return None

    def _from_stage(self, config: ModelConfig, kind: str, role: str) -> ModelSpec:
        """The export of an earlier stage; before that stage has run, its model stands in for the checks."""
        stage, _, source = str(config.path).removeprefix(STAGE).partition("/")
        job = self.earlier.get(stage)
        if job is None:
            raise ConfigError(
                f"{role}.model.path: there is no earlier stage {stage!r} (earlier stages: {', '.join(self.earlier) or 'none'})"
            )
        trained = [n for n, m in job.models.items() if m.spec.optimizer is not None]
        source = source or (role if role in trained else trained[0])
        if source not in trained:
            raise ConfigError(f"{role}.model.path: stage {stage!r} trains {', '.join(trained)}, not {source!r}")
        folder = job.folder / "export" / source
        if (folder / "config.json").exists():
            return resolve_model(attrs.evolve(config, path=str(folder)), kind, role)
        return attrs.evolve(job.models[source].spec.model, kind=kind, path=None)

    def _layout(self, role: str, section: RoleSection, pool: ResourcePool) -> ParallelLayout | None:
        asked = section.layout
        inner = asked.tp * asked.pp * asked.cp
        if pool.world % inner or (asked.dp is not None and asked.dp * inner != pool.world):
            wanted = f"dp {asked.dp} x " if asked.dp else ""
            self.problems.append(
                f"{role}.layout: {wanted}tp {asked.tp} x pp {asked.pp} x cp {asked.cp} does not fit pool {pool.name!r} of "
                f"{pool.world} devices: the product must be {pool.world}; change the layout or pools.{pool.name}"
            )
            return None
        try:
            return ParallelLayout(asked.pp, asked.tp, pool.world // inner, asked.cp, asked.ep, asked.order)
        except ValueError as error:
            self.problems.append(f"{role}.layout: {error}")
            return None

    def _tokenizer_path(self, tokenizer: TokenizerConfig) -> str | None:
        """The folder to take the tokenizer from: an earlier stage's export comes before [tokenizer]."""
        for name in ("actor", "reward", *self.tables):
            table = self.tables.get(name)
            path = table.get("model", {}).get("path") if isinstance(table, Mapping) else None
            if isinstance(path, str) and path.startswith(STAGE):
                job = self.earlier.get(path.removeprefix(STAGE).partition("/")[0])
                return str(job.folder / "tokenizer") if job else None
            if isinstance(path, str) and tokenizer == TokenizerConfig():
                return path
        return None

    # Across sections
    def _cross_checks(self, job: Job) -> None:
        run, p = job.run, self.problems
        if run.max_staleness:
            p.append(f"run.max_staleness: is {run.max_staleness}; 0 (synchronous) is the only value that works so far")
        for name, pool in job.pools.items():
            if job.runtime == "inline" and pool.world > 1:
                p.append(
                    f"pools.{name}: has {pool.world} devices, and runtime inline runs models on one rank; set pools.{name} = [1] "
                    "or runtime = ray"
                )
            if not any(m.pool == name for m in job.models.values()) and name != job.main_pool:
                p.append(f"pools.{name}: no role uses it; remove it or place a role in it")
        needs_responses = "response_ids" in job.algorithm.data_columns
        if needs_responses and job.data.response is None and job.data.messages is None:
            p.append(
                f"data.response: algorithm {job.algorithm_name!r} trains on responses; give their template, such as '{{answer}}'"
            )
        if job.validation is not None and job.validation.generate and not job.rewards and "reward" not in job.models:
            p.append("validation: needs a reward to score by; add [reward], or set validation.generate = false")
        limit = job.data.max_prompt_tokens
        for name, model in job.models.items():
            most = model.spec.model.max_positions
            if (
                most is not None
                and model.role.kind == "policy"
                and model.spec.engine
                and limit + job.sampling.max_tokens > most
            ):
                p.append(
                    f"{name}: prompts of up to {limit} tokens (data.max_prompt_tokens) and responses of up to "
                    f"{job.sampling.max_tokens} (sampling.max_tokens) exceed the model's {most} positions "
                    "(max_position_embeddings); make one of them smaller"
                )
            if model.spec.engine and model.layout.world != model.layout.dp * model.layout.tp:
                p.append(f"{name}.layout: generation runs with engine tp 1 on every rank; got {model.layout}")


def resolve_jobs(tables: dict[str, Any], name: str, shorthand: frozenset[str]) -> list[Job]:
    """The jobs of a configuration, in order. Raises ConfigError with all problems of all stages."""
    jobs: dict[str, Job] = {}
    problems: list[str] = []
    for stage, own in stage_tables(tables, shorthand).items():
        resolver = Resolver(own, name, stage, jobs)
        job = resolver.job()
        prefix = f"stage {stage}: " if stage else ""
        problems += [prefix + p for p in dict.fromkeys(resolver.problems)]
        if job is not None:
            jobs[stage or name] = job
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return list(jobs.values())
