"""The roles of an algorithm, resolved: which model or reward, in which pool, in which layout, on which backend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from hybridflow.core.config.load import merge
from hybridflow.core.contracts.role import Role
from hybridflow.core.contracts.rollout import engine_settings
from hybridflow.core.contracts.runtime import ResourcePool
from hybridflow.core.errors import ConfigError, HybridFlowError
from hybridflow.core.job.job import AUTO, Job, ModelRole, PlacedModel, Rewards, SyncSpec
from hybridflow.core.job.models import resolve_model
from hybridflow.core.job.reader import Reader, keys_of, salvage
from hybridflow.core.job.schema import (
    LayoutSection,
    RewardPart,
    RoleSection,
    SamplingSection,
    SyncConfig,
)
from hybridflow.core.job.stages import STAGE
from hybridflow.core.names import did_you_mean
from hybridflow.core.plugins import registry
from hybridflow.core.plugins.resolve import reward_from
from hybridflow.core.values.model import ModelConfig, ModelSpec
from hybridflow.core.values.parallel import GenerationLayout, ParallelLayout, generation_layout

MODEL_KEYS = (
    "pool",
    "layout",
    "generation",
    "sync",
    "backend",
    "optimizer",
    "micro_batch_tokens",
    "offload",
)
REWARD_KEYS = ("function", "parts", "options", "on_failure", "per_token")


def inherits(role: Role) -> bool:
    """Whether what its table does not give is the actor's."""
    return role.kind in ("policy", "value") and role.name != "actor"


def role_table(tables: Mapping[str, Any], role: Role) -> dict[str, Any]:
    """A role's table, over the actor's where it inherits. Another model, or another backend, is not mixed with the
    actor's: of those nothing is inherited."""
    own = dict(tables.get(role.name, {}))
    if not inherits(role) or not isinstance(tables.get("actor"), Mapping):
        return own
    inherited = dict(tables["actor"])
    model = own.get("model")
    if isinstance(model, Mapping) and {"path", "config"} & set(model):
        inherited.pop("model", None)
    backend, actors = own.get("backend"), inherited.get("backend")
    if isinstance(backend, Mapping) and isinstance(actors, Mapping):
        actors_name = actors.get("name") or registry().default("training_backend")
        if backend.get("name", actors_name) != actors_name:
            names = registry().names("training_backend")
            inherited["backend"] = {
                k: v for k, v in actors.items() if k in names and isinstance(v, Mapping)
            }
    return merge(inherited, own)


class RoleResolver:
    """Resolves roles one after the other; problems go to the reader."""

    def __init__(
        self,
        reader: Reader,
        pools: Mapping[str, ResourcePool],
        sampling: SamplingSection,
        earlier: Mapping[str, Job | None],
    ):
        self.reader, self.pools, self.sampling, self.earlier = reader, pools, sampling, earlier
        self.models: dict[str, PlacedModel] = {}
        self.scorers: dict[str, Rewards] = {}

    def resolve(self, role: Role, generates: bool) -> None:
        """Add the role to `models` or `scorers`, or note what is wrong with it."""
        before = len(self.reader.problems)
        own = self.reader.tables.get(role.name, {})
        if not isinstance(own, Mapping):
            self.reader.fail(
                "roles", f"{role.name}: expected a table, got {own!r}; write [{role.name}]"
            )
            return
        section, problems = salvage(role_table(self.reader.tables, role), RoleSection, role.name)
        section, bad = section or RoleSection(), keys_of(problems, role.name)
        self.reader.problems += problems
        made: PlacedModel | Rewards | None = None
        if role.kind == "reward" and "model" not in own:
            made = (
                None if bad & {"function", "parts", "options"} else self._reward(role, own, section)
            )
        elif not self._contradictions(role, own):
            made = self._model(role, section, bad, generates)
        if made is None or bad:
            self.reader.failed.add("roles")
        elif isinstance(made, PlacedModel):
            self.models[role.name] = made
        else:
            self.scorers[role.name] = made
        if inherits(role):
            self._forget_inherited(role.name, own, before)

    def _forget_inherited(self, name: str, own: Mapping[str, Any], before: int) -> None:
        """A problem of the actor's table is said once, not again for each role that inherits it."""
        problems = self.reader.problems
        new = []
        for problem in problems[before:]:
            key = problem.partition(":")[0].partition(" ")[0].removeprefix(f"{name}.")
            if "actor" + problem.removeprefix(name) not in problems[:before] or _given(own, key):
                new.append(problem)
        problems[before:] = new

    def _contradictions(self, role: Role, own: Mapping[str, Any]) -> bool:
        """Whether a model's table has what belongs to a reward function."""
        found = [key for key in REWARD_KEYS if key in own]
        if role.kind == "reward":
            why = "a reward is one of a function, several parts and a model; keep one of them"
            self.reader.problems += [
                f"{role.name}.{key}: contradicts {role.name}.model: {why}" for key in found
            ]
        else:
            why = f"is for rewards, and {role.name} is a {role.kind} model; remove it"
            self.reader.problems += [f"{role.name}.{key}: {why}" for key in found]
        return bool(found)

    # Rewards
    def _reward(self, role: Role, own: Mapping[str, Any], section: RoleSection) -> Rewards | None:
        problems = self._reward_problems(role, own, section)
        if problems:
            self.reader.problems += problems
            return None
        parts = section.parts
        if section.function is not None:
            label = section.function.rpartition(":")[2]
            options, rule = section.options, section.on_failure
            parts = (
                RewardPart(
                    label, section.function, options, on_failure=rule, per_token=section.per_token
                ),
            )
        for part in parts:
            try:
                reward_from(part.function, part.options)
            except ConfigError as error:
                problems += error.problems
            except (HybridFlowError, ValueError) as error:
                problems.append(str(error))
        self.reader.problems += [f"{role.name}: {p}" for p in problems]
        return None if problems else Rewards(role, parts, section)

    def _reward_problems(
        self, role: Role, own: Mapping[str, Any], section: RoleSection
    ) -> list[str]:
        name, problems = role.name, []
        if section.function is None and not section.parts:
            there = ", ".join(registry().names("reward"))
            problems.append(
                f'{name}: give one of `function` (a plugin: {there}; or "package.module:function"), `parts` (several), '
                "or `model`"
            )
        if section.function is not None and section.parts:
            problems.append(f"{name}.parts: contradicts {name}.function; keep one of them")
        for key in ("options", "on_failure", "per_token"):
            if section.parts and key in own:
                problems.append(
                    f"{name}.{key}: belongs to one function; with parts each has its own"
                )
        names = [p.name for p in section.parts]
        problems += [
            f"{name}.parts: two parts are called {twice!r}, and each has a column of its name; rename one"
            for twice in sorted({n for n in names if names.count(n) > 1})
        ]
        problems += [
            f"{name}.{key}: is for models, and {name} is a function (it runs where the data is); remove it"
            for key in MODEL_KEYS
            if key in own
        ]
        return problems

    # Models
    def _model(
        self, role: Role, section: RoleSection, bad: set[str], generates: bool
    ) -> PlacedModel | None:
        """`bad`: keys of its table that have problems; what hangs on them is not looked at."""
        kind = "score" if role.kind == "reward" else role.kind
        pool = self.pools.get(section.pool)
        if pool is None and section.pool not in self.reader.tables.get(
            "pools", {}
        ):  # else: said of the pool
            self.reader.problems.append(f"{role.name}.pool: {self._no_pool(section.pool)}")
        spec = None if "model" in bad else self._spec(section.model, kind, role.name)
        layout = (
            None
            if pool is None or bad & {"layout", "pool"}
            else self._layout(role.name, section.layout, pool)
        )
        backend = engine = None
        if "backend" not in bad:
            backend = self.reader.plugin(
                "training_backend", section.backend, f"{role.name}.backend"
            )
        if generates:
            engine = self.reader.plugin(
                "rollout_engine", self.reader.tables.get("rollout", {}), "rollout"
            )
        if spec is None or layout is None or backend is None or (generates and engine is None):
            return None
        if not backend.good or (engine and not engine.good):
            return None
        try:
            looks = backend.found is not None and not self.reader.unplaced
            found = backend.found.problems(backend.config, layout, kind) if looks else []
        except (HybridFlowError, ValueError) as error:
            found = [str(error)]
        found = [*found, *_beyond(backend.name, layout, kind), *self._size_problems(spec, layout)]
        generation = sync = None
        apart = None if section.generation.pool == section.pool else section.generation.pool
        if engine is not None:
            found += _heads_problems(spec, "generation.tp", section.generation.tp)
            settings = engine_settings(engine.config)
            found += [f"rollout.{problem}" for problem in settings.problems()]
            generation = self._generation(section, engine.name, settings.own_process, layout, found)
            sync = self._sync(role.name, section.sync, apart, found)
        self.reader.problems += [
            f"{role.name}.{p}"
            if p.startswith(("layout.", "generation", "sync."))
            else f"{role.name}: {p}"
            for p in found
        ]
        model = ModelRole(
            model=spec,
            backend=backend.name,
            backend_config=backend.config,
            micro_batch_tokens=section.micro_batch_tokens,
            optimizer=section.optimizer if role.trained else None,
            engine=engine.name if engine else None,
            engine_config=engine.config if engine else None,
            temperature=self.sampling.temperature or 1.0,
            offload=section.offload,
            sync=sync or SyncSpec(),
            keep_engine=section.generation.keep,
        )
        good = not found and (engine is None or sync is not None)
        return (
            PlacedModel(role, model, layout, section.pool, section, generation, apart)
            if good
            else None
        )

    def _no_pool(self, name: str) -> str:
        return f"there is no pool {name!r}{did_you_mean(name, self.pools)} (pools: {', '.join(self.pools) or 'none'})"

    def _sync(
        self, role: str, section: SyncConfig, apart: str | None, problems: list[str]
    ) -> SyncSpec | None:
        """The transport that carries the weights; apart: the pool of the engines, if they have one of their own."""
        spec = SyncSpec(bucket_mb=section.bucket_mb, alias=section.alias, verify=section.verify)
        name = section.transport.get("name", AUTO)
        if name == AUTO:
            strange = [key for key in section.transport if key != "name"]
            problems += [
                f"sync.transport.{key}: belongs to a transport; give its name too"
                for key in strange
            ]
            return spec
        choice = self.reader.plugin("transport", section.transport, f"{role}.sync.transport")
        if choice is None or not choice.good:
            return None
        if apart is not None and not choice.found.crosses_pools:
            problems.append(
                f"sync.transport: {name} moves weights inside one pool, and generation.pool is {apart!r}; leave it out, or "
                "name another (auto takes what works)"
            )
        return attrs.evolve(spec, transport=choice.name, transport_config=choice.config)

    def _generation(
        self,
        role: RoleSection,
        engine: str,
        apart: bool,
        layout: ParallelLayout,
        problems: list[str],
    ) -> GenerationLayout | None:
        """apart: whether the engine has a process of its own."""
        can = registry().engine_capabilities(engine)
        section, grouping = role.generation, role.generation.grouping
        pool = self.pools.get(section.pool or role.pool)
        if pool is None:
            problems.append(f"generation.pool: {self._no_pool(str(section.pool))}")
            return None
        if section.pool not in (None, role.pool):
            layout, grouping = (
                ParallelLayout(dp=pool.world),
                "consecutive",
            )  # they hold nothing that could stay
        if can.grouping == "consecutive":  # an engine may form its groups itself
            grouping = "consecutive"
        if role.sync.verify and (apart or not can.views):
            where = " in a process of its own" if can.views else ""
            problems.append(
                f"sync.verify: the engine {engine}{where} gives no view of its weights to compare; leave it out"
            )
        for axis, size, able in (("tp", section.tp, can.tp), ("pp", section.pp, can.pp)):
            if size > 1 and apart and can.process != "own":
                problems.append(
                    f"generation.{axis}: is {size}, and the engine {engine} in a process of its own runs on one rank; leave "
                    "out rollout.own_process"
                )
            elif size > 1 and not able:
                problems.append(
                    f"generation.{axis}: is {size}, and the engine {engine} runs on one rank; set it to 1"
                )
        try:
            return generation_layout(
                layout, section.pp, section.tp, grouping, pool.devices_per_node[0]
            )
        except ValueError as error:
            problems.append(f"generation: {error}; choose a tp and pp that divide them")
            return None

    def _size_problems(self, spec: ModelSpec, layout: ParallelLayout) -> list[str]:
        """What the model's own sizes say against the layout, or against training at all."""
        problems = []
        if not isinstance(spec.hf_config.get("vocab_size"), int):
            problems.append("the model's config needs vocab_size, the number of its embeddings")
        problems += _heads_problems(spec, "layout.tp", layout.tp)
        layers = spec.hf_config.get("num_hidden_layers")
        if isinstance(layers, int) and layers < layout.pp:
            problems.append(
                f"layout.pp: is {layout.pp}, and the model has {layers} layers; make it smaller"
            )
        return problems

    def _spec(self, config: ModelConfig, kind: str, role: str) -> ModelSpec | None:
        try:
            if config.path is not None and config.path.startswith(STAGE) and config.config is None:
                return self._from_stage(config, kind, role)
            return resolve_model(config, kind, role, weights=not self.reader.elsewhere)
        except ConfigError as error:
            self.reader.problems += error.problems
        except HybridFlowError as error:
            self.reader.problems.append(str(error))
        return None

    def _from_stage(self, config: ModelConfig, kind: str, role: str) -> ModelSpec | None:
        """The export of an earlier stage; before that stage has run, its model stands in for the checks."""
        stage, _, source = str(config.path).removeprefix(STAGE).partition("/")
        if stage not in self.earlier:
            there = f"earlier stages: {', '.join(self.earlier) or 'none'}"
            raise ConfigError(
                f"{role}.model.path: there is no earlier stage {stage!r}{did_you_mean(stage, self.earlier)} ({there})"
            )
        job = self.earlier[stage]
        if job is None:  # its own problems are said
            return None
        trained = [n for n, m in job.models.items() if m.spec.optimizer is not None]
        source = source or (role if role in trained or not trained else trained[0])
        if source not in trained:
            hint = f'; write "{STAGE}{stage}/{trained[0]}"' if trained else ""
            raise ConfigError(
                f"{role}.model.path: stage {stage!r} trains {', '.join(trained) or 'no model'}, not {source!r}{hint}"
            )
        export = str(job.folder / "export" / source)
        return attrs.evolve(job.models[source].spec.model, kind=kind, path=None, export=export)

    def _layout(self, role: str, asked: LayoutSection, pool: ResourcePool) -> ParallelLayout | None:
        inner, world = asked.tp * asked.pp * asked.cp, pool.world
        if world % inner or (asked.dp is not None and asked.dp * inner != world):
            self.reader.problems.append(_does_not_fit(role, asked, pool))
            return None
        try:
            return ParallelLayout(
                asked.pp, asked.tp, world // inner, asked.cp, asked.ep, asked.order
            )
        except ValueError as error:
            self.reader.problems.append(f"{role}.layout: {error}")
            return None


def _beyond(backend: str, layout: ParallelLayout, kind: str) -> list[str]:
    """What a training backend says that it has not: axes, kinds of model."""
    can = registry().training_capabilities(backend)
    sizes = {
        axis: size
        for axis, size in attrs.asdict(layout).items()
        if axis not in can.axes | {"order"}
    }
    found = [
        f"layout.{axis}: is {size}, and the backend {backend} has the axes {', '.join(sorted(can.axes))}; set it to 1"
        for axis, size in sizes.items()
        if size > 1
    ]
    if kind not in can.models:
        found.append(
            f"the backend {backend} has models of kind {', '.join(sorted(can.models))}, and this one is a {kind}"
        )
    return found


def _heads_problems(spec: ModelSpec, key: str, tp: int) -> list[str]:
    heads = spec.hf_config.get("num_attention_heads")
    if not isinstance(heads, int) or heads % tp == 0:
        return []
    return [
        f"{key}: {tp} does not divide the model's {heads} attention heads; give a divisor of {heads}"
    ]


def _does_not_fit(role: str, asked: LayoutSection, pool: ResourcePool) -> str:
    inner, world = asked.tp * asked.pp * asked.cp, pool.world
    dp = f"dp {asked.dp} x " if asked.dp else ""
    needs = inner * (asked.dp or -(-world // inner))
    head = (
        f"{role}.layout: {dp}tp {asked.tp} x pp {asked.pp} x cp {asked.cp} does not fit pool {pool.name!r} of {world} "
        f"device{'s' if world > 1 else ''}"
    )
    if world % inner == 0:
        return f"{head}: leave out {role}.layout.dp (it is then {world // inner}), or set pools.{pool.name} = [{needs}]"
    divisors = ", ".join(str(d) for d in range(1, world + 1) if world % d == 0)
    return f"{head}: tp x pp x cp must divide {world} ({divisors}); change it, or set pools.{pool.name} = [{needs}]"


def _given(table: Mapping[str, Any], key: str) -> bool:
    """Whether a dotted key, or what it is in, stands in a table."""
    here: Any = table
    for part in key.split("."):
        if not isinstance(here, Mapping):
            return True
        if part not in here:
            return False
        here = here[part]
    return True
