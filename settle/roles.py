"""Resolves an algorithm's roles: their models or rewards, pools, layouts, backends and engines.

role's table, over the actor's  --RoleSection-->  section
                                                    |
     "reward" without a model                       |                any other role
    +-----------------------------------------------+---------------------------+
    v                                                                           v
function, parts: reward_from          pool, model, layout, backend, engine: each separately,
    |                                 then against each other: sizes, axes, kinds
    v                                                                           v
Rewards                                                                    PlacedModel
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from hybridflow.core.contracts.role import Role
from hybridflow.core.contracts.rollout import EngineSettings, engine_settings
from hybridflow.core.contracts.runtime import ResourcePool
from hybridflow.core.contracts.training import OptimizerConfig
from hybridflow.core.errors import HybridFlowError
from hybridflow.core.job.job import AUTO, Chosen, Job, ModelRole, PlacedModel, Rewards
from hybridflow.core.job.sections import (
    LayoutSection,
    RewardPart,
    RoleSection,
    RunSection,
)
from hybridflow.core.names import did_you_mean
from hybridflow.core.plugins import registry
from hybridflow.core.plugins.resolve import reward_from
from hybridflow.core.values.model import ModelConfig, ModelSpec
from hybridflow.core.values.parallel import GenerationLayout, ParallelLayout, generation_layout
from hybridflow.settle.config.load import merge
from hybridflow.settle.config.structure import Invalid, Problem
from hybridflow.settle.models import read_model
from hybridflow.settle.reader import Choice, Reader, first_keys, salvage, sentences
from hybridflow.settle.schema import SamplingSection
from hybridflow.settle.stages import STAGE

MODEL_KEYS = (
    "layout",
    "generation",
    "sync",
    "backend",
    "optimizer",
    "micro_batch_tokens",
    "offload",
)
"""Keys of a role's table that only models have."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys of a model's config that mark it as a mixture of experts."""
REWARD_KEYS = ("function", "parts", "options", "on_failure", "per_token")
"""Keys of a role's table that only reward functions have."""


def inherits(role: Role) -> bool:
    """Return whether the role takes settings that its own table lacks from the actor's table."""
    return role.kind in ("policy", "value") and role.name != "actor"


def role_table(tables: Mapping[str, Any], role: Role) -> dict[str, Any]:
    """Merge a role's table over the actor's where it inherits.

    A role with a model of its own inherits nothing of the actor's model, and one with a backend of
    its own nothing of the actor's backend: settings of two models or backends are not mixed. A
    reward's model inherits the backend alone, so that it has the same precision.
    """
    own = dict(tables.get(role.name, {}))
    if not isinstance(tables.get("actor"), Mapping):
        return own
    if inherits(role):
        inherited = dict(tables["actor"])
    elif role.kind == "reward" and "model" in own:
        inherited = _backend_of(tables["actor"])
    else:
        return own

    # A model of its own
    model = own.get("model")
    if isinstance(model, Mapping) and {"path", "config"} & set(model):
        inherited.pop("model", None)

    # A backend of its own
    backend = own.get("backend")
    actors = inherited.get("backend")
    if isinstance(backend, Mapping) and isinstance(actors, Mapping):
        actors_name = actors.get("name") or registry().default("training_backend")
        # Sub-tables for one backend each ([actor.backend.fsdp]) hold for every role.
        if backend.get("name", actors_name) != actors_name:
            names = registry().names("training_backend")
            inherited["backend"] = {
                key: table
                for key, table in actors.items()
                if key in names and isinstance(table, Mapping)
            }
    return merge(inherited, own)


def _backend_of(actor: Mapping[str, Any]) -> dict[str, Any]:
    """Return the actor's key `backend` as a table, without adapters, which no other role has."""
    backend = actor.get("backend")
    if isinstance(backend, Mapping):
        backend = {key: value for key, value in backend.items() if key != "lora"}
    return {} if backend is None else {"backend": backend}


class RoleResolver:
    """Resolves roles one after the other; problems go to the reader.

    `earlier` are the jobs of the stages before this one, None for those with problems. `updates` is
    the number of optimizer steps of the run, None where the algorithm does not state it; `tokens`
    is the length of the longest prompt with the longest response, None where prompts have no limit.
    """

    def __init__(
        self,
        reader: Reader,
        pools: Mapping[str, ResourcePool],
        run: RunSection,
        sampling: SamplingSection,
        earlier: Mapping[str, Job | None],
        updates: int | None,
        tokens: int | None,
    ):
        self.reader = reader
        self.pools = pools
        self.run = run
        self.sampling = sampling
        self.earlier = earlier
        self.updates = updates
        self.tokens = tokens
        self.models: dict[str, PlacedModel] = {}
        self.scorers: dict[str, Rewards] = {}

    def resolve(self, role: Role, generates: bool) -> None:
        """Add the role to `models` or `scorers`, or note what is wrong with it."""
        reader = self.reader
        before = len(reader.problems)
        own = reader.tables.get(role.name, {})
        if not isinstance(own, Mapping):
            text = f"expected a table, got {own!r}; write [{role.name}]"
            reader.fail("roles", Problem(role.name, text))
            return

        # Keys with problems get their defaults, so that the others are still checked.
        section, problems = salvage(role_table(reader.tables, role), RoleSection)
        section = section or RoleSection()
        bad = first_keys(problems)
        self._note(role, problems)

        # A reward is a model or functions; the keys of one contradict the other.
        resolved: PlacedModel | Rewards | None = None
        if role.kind == "reward" and "model" not in own:
            if not bad & {"function", "parts", "options"}:
                resolved = self._reward(role, own, section)
        elif not self._contradictions(role, own):
            resolved = self._model(role, section, bad, generates)

        if resolved is None or bad:
            reader.failed.add("roles")
        elif isinstance(resolved, PlacedModel):
            self.models[role.name] = resolved
        else:
            self.scorers[role.name] = resolved

        if inherits(role):
            self._forget_inherited(role.name, own, before)

    def _forget_inherited(self, name: str, own: Mapping[str, Any], before: int) -> None:
        """Drop a role's problems that come from the actor's table, where they are reported already.

        The role's problems are those of the reader after the first `before`.
        """
        # A problem is inherited if the actor has the same one, at a key that the own table lacks.
        problems = self.reader.problems
        own_problems = []
        for problem in problems[before:]:
            same = Problem("actor" + problem.key.removeprefix(name), problem.text)
            key = problem.key.removeprefix(f"{name}.")
            if same not in problems[:before] or _given(own, key):
                own_problems.append(problem)
        problems[before:] = own_problems

    def _note(self, role: Role, problems: Iterable[Problem]) -> None:
        """Note problems whose keys are relative to the role's table."""
        self.reader.problems += [problem.inside(role.name) for problem in problems]

    def _contradictions(self, role: Role, own: Mapping[str, Any]) -> bool:
        """Note keys of a model's table that belong to reward functions; return whether any do."""
        keys = [key for key in REWARD_KEYS if key in own]
        if role.kind == "reward":
            why = (
                f"contradicts {role.name}.model: a reward is one of a function, several parts and "
                "a model; keep one of them"
            )
        else:
            why = f"is for rewards, and {role.name} is a {role.kind} model; remove it"
        self._note(role, [Problem(key, why) for key in keys])
        return bool(keys)

    # --- rewards ---

    def _reward(self, role: Role, own: Mapping[str, Any], section: RoleSection) -> Rewards | None:
        """Resolve a role that scores by functions; each is loaded once, to check its options."""
        if contradictions := self._reward_problems(role, own, section):
            self._note(role, contradictions)
            return None

        # A single function is a sum of one part.
        parts = section.parts
        if section.function is not None:
            part = RewardPart(
                section.function.rpartition(":")[2],
                section.function,
                section.options,
                on_failure=section.on_failure,
                per_token=section.per_token,
            )
            parts = (part,)

        # Made once and thrown away: a wrong option is found before anything starts.
        problems: list[str] = []
        for part in parts:
            try:
                reward_from(part.function, part.options)
            except (HybridFlowError, ValueError) as error:
                problems += sentences(error)
        self.reader.note(role.name, *problems)
        pool = section.pool if "pool" in own else None
        return None if problems else Rewards(role, parts, pool, section)

    def _reward_problems(
        self, role: Role, own: Mapping[str, Any], section: RoleSection
    ) -> list[Problem]:
        """Return the contradictions in the table of a role that scores by functions."""
        # One way to give the functions, and only one
        name = role.name
        problems = []
        if section.function is None and not section.parts:
            plugins = ", ".join(registry().names("reward"))
            text = (
                f"give one of `function` (a plugin: {plugins}; or "
                '"package.module:function"), `parts` (several), or `model`'
            )
            problems.append(Problem("", text))
        if section.function is not None and section.parts:
            problems.append(Problem("parts", f"contradicts {name}.function; keep one of them"))

        # Settings of one function, beside several
        for key in ("options", "on_failure", "per_token"):
            if section.parts and key in own:
                text = "belongs to one function; with parts each has its own"
                problems.append(Problem(key, text))

        # Names of parts name columns.
        labels = [part.name for part in section.parts]
        for twice in sorted({label for label in labels if labels.count(label) > 1}):
            text = f"two parts are called {twice!r}, and each has a column of its name; rename one"
            problems.append(Problem("parts", text))

        # Settings of models
        for key in MODEL_KEYS:
            if key in own:
                text = f"is for models, and {name} is a function"
                problems.append(Problem(key, f"{text}; remove it"))
        if "pool" in own and self._is_unknown(section.pool):
            problems.append(Problem("pool", self._no_pool(section.pool)))
        return problems

    # --- models ---

    def _model(
        self, role: Role, section: RoleSection, bad: set[str], generates: bool
    ) -> PlacedModel | None:
        """Resolve a role with a model; None where anything is wrong with it.

        `bad` are the keys of its table with problems; checks that depend on them are skipped.
        """
        reader = self.reader
        kind = "score" if role.kind == "reward" else role.kind

        # Each part separately. A pool of [pools] that has problems is reported there.
        pool = self.pools.get(section.pool)
        if pool is None and self._is_unknown(section.pool):
            reader.note(f"{role.name}.pool", self._no_pool(section.pool))
        for key, name in (("pool", section.pool), ("generation.pool", section.generation.pool)):
            found = self.pools.get(str(name))
            if found is not None and found.device == "cpu":
                text = f"pool {name!r} is on CPUs, for reward functions; choose one for models"
                reader.note(f"{role.name}.{key}", text)
        spec = None if "model" in bad else self._spec(section.model, kind, role.name)
        fields = spec.hf_config if spec is not None else None
        layout = backend = engine = None
        if pool is not None and not bad & {"layout", "pool"}:
            layout = self._layout(role.name, section.layout, pool)
        if "backend" not in bad:
            path = f"{role.name}.backend"
            backend = reader.plugin("training_backend", section.backend, path, fields)
        if generates:
            table = reader.tables.get("rollout", {})
            engine = self._engine(reader.plugin("rollout_engine", table, "rollout", fields))

        if spec is None or layout is None or backend is None or (generates and engine is None):
            return None
        if not backend.good or (engine and not engine.good):
            return None

        # The parts against each other.
        problems = [
            *self._backend_problems(backend, layout, spec),
            *_beyond(backend.name, layout, kind),
            *self._size_problems(spec, layout),
        ]
        generation = transport = apart = None
        if engine is not None:
            apart = None if section.generation.pool == section.pool else section.generation.pool
            uneven = _heads_problems(spec, "generation.tp", section.generation.tp)
            problems += uneven
            settings = engine_settings(engine.config)
            generation = self._generation(
                section, engine.name, settings.own_process, layout, problems
            )
            if not uneven:
                problems += self._engine_problems(engine, spec, generation)
            transport = self._transport(role.name, section.sync.transport, apart, problems)
        optimizer = self._optimizer(section.optimizer, problems) if role.trained else None

        self._note(role, problems)
        if problems or (engine is not None and transport is None):
            return None

        stop = math.inf
        if engine is not None:
            stop = self.run.mismatch_stop or _mismatch_stop(spec, backend.config, engine.config)
        elif role.generates:  # where another run's responses are replayed
            stop = self.run.mismatch_stop or math.inf
        model = ModelRole(
            model=spec,
            backend=backend.name,
            backend_config=backend.config,
            micro_batch_tokens=section.micro_batch_tokens,
            optimizer=optimizer,
            engine=engine.name if engine else None,
            engine_config=engine.config if engine else None,
            temperature=self.sampling.temperature or 1.0,
            ahead=self.run.max_staleness > 0,
            keeps_cache=self.run.max_staleness > 0 and self.run.in_flight == "keep",
            mismatch_stop=stop,
            offload=section.offload,
            sync=section.sync,
            transport=transport or Chosen(AUTO),
            keep_engine=section.generation.keep,
        )
        return PlacedModel(role, model, layout, section.pool, section, generation, apart)

    def _engine(self, choice: Choice | None) -> Choice | None:
        """Return a rollout engine with settings for the run's longest sequences, on a GPU."""
        if choice is None or self.tokens is None or self.reader.device == "cpu":
            return choice
        # A config without EngineSettings stays unchanged.
        if not isinstance(choice.config, EngineSettings):
            return choice
        return attrs.evolve(choice, config=choice.config.up_to(self.tokens))

    def _optimizer(self, given: OptimizerConfig, problems: list[Problem]) -> OptimizerConfig | None:
        """Return the optimizer; without an end of its own, its schedule ends with the run."""
        try:
            return given.over(self.updates)
        except ValueError as error:
            problems.append(Problem("optimizer", str(error)))
            return None

    def _backend_problems(
        self, backend: Choice, layout: ParallelLayout, model: ModelSpec
    ) -> list[Problem]:
        """Return the backend's own problems with them; [] if not installed or placed."""
        if backend.found is None or self.reader.unplaced:
            return []
        try:
            texts = backend.found.problems(backend.config, layout, model)
        except (HybridFlowError, ValueError) as error:
            texts = [str(error)]
        return [Problem("", text) for text in texts]

    def _engine_problems(
        self, engine: Choice, model: ModelSpec, generation: GenerationLayout | None
    ) -> list[Problem]:
        """Return the engine's own problems with them; [] if not installed or placed."""
        if engine.found is None or self.reader.unplaced or generation is None:
            return []
        settings = engine_settings(engine.config)
        try:
            texts = settings.problems(model, generation, self.reader.device)
        except (HybridFlowError, ValueError) as error:
            texts = [str(error)]
        return [Problem("", text) for text in texts]

    def _is_unknown(self, name: str | None) -> bool:
        """Return whether [pools] has no such pool, not even one with problems."""
        return name is not None and name not in {*self.pools, *self.reader.tables.get("pools", {})}

    def _no_pool(self, name: str) -> str:
        """Return the sentence that no pool has this name."""
        pools = ", ".join(self.pools) or "none"
        return f"there is no pool {name!r}{did_you_mean(name, self.pools)} (pools: {pools})"

    def _transport(
        self, role: str, table: Mapping[str, Any], apart: str | None, problems: list[Problem]
    ) -> Chosen | None:
        """Choose the transport of the weights.

        None where there is no such plugin or its settings are wrong. `apart` is the pool of the
        engines if they have one of their own; a transport that cannot reach it is returned too, and
        noted in `problems`.
        """
        name = table.get("name", AUTO)
        if name == AUTO:
            problems += [
                Problem(f"sync.transport.{key}", "belongs to a transport; give its name too")
                for key in table
                if key != "name"
            ]
            return Chosen(AUTO)

        # A transport by name must reach from the trainer's pool to the engines'.
        choice = self.reader.plugin("transport", table, f"{role}.sync.transport")
        if choice is None or not choice.good:
            return None
        if apart is not None and not choice.found.crosses_pools:
            text = (
                f"{name} moves weights inside one pool, and generation.pool is {apart!r}; leave it "
                "out, or name another (auto takes what works)"
            )
            problems.append(Problem("sync.transport", text))
        if apart is None and not choice.found.serves_one_pool:
            text = (
                f"{name} moves weights to engines in a pool of their own (generation.pool); leave "
                "it out (auto takes what works)"
            )
            problems.append(Problem("sync.transport", text))
        return Chosen(choice.name, choice.config)

    def _generation(
        self,
        role: RoleSection,
        engine: str,
        apart: bool,
        layout: ParallelLayout,
        problems: list[Problem],
    ) -> GenerationLayout | None:
        """Return the engines' layout over the role's ranks, or over the engines' own pool.

        `apart` says whether the engine runs in a process of its own.
        """
        can = registry().engine_capabilities(engine)
        section = role.generation
        grouping = section.grouping
        pool = self.pools.get(section.pool or role.pool)
        if pool is None:
            problems.append(Problem("generation.pool", self._no_pool(str(section.pool))))
            return None

        # Ranks of another pool hold no training shards that could stay where they are.
        if section.pool not in (None, role.pool):
            layout = ParallelLayout(dp=pool.world)
            grouping = "consecutive"
        # An engine may form its groups itself.
        if can.grouping == "consecutive":
            grouping = "consecutive"

        # Weights can only be compared with an engine that gives views of its own.
        if role.sync.verify and not can.views:
            text = f"the engine {engine} gives no view of its weights to compare; leave it out"
            problems.append(Problem("sync.verify", text))
        axes = (("tp", section.tp, can.tp), ("pp", section.pp, can.pp))
        for axis, size, able in axes:
            key = f"generation.{axis}"
            if size > 1 and apart and can.process != "own":
                text = (
                    f"is {size}, and the engine {engine} in a process of its own runs on one rank; "
                    "leave out rollout.own_process"
                )
                problems.append(Problem(key, text))
            elif size > 1 and not able:
                text = f"is {size}, and the engine {engine} runs on one rank; set it to 1"
                problems.append(Problem(key, text))

        try:
            return generation_layout(
                layout, section.pp, section.tp, grouping, pool.devices_per_node[0]
            )
        except ValueError as error:
            text = f"{error}; choose a tp and pp that divide them"
            problems.append(Problem("generation", text))
            return None

    def _size_problems(self, spec: ModelSpec, layout: ParallelLayout) -> list[Problem]:
        """Return problems of the model's config with the layout, and what training lacks in it."""
        problems = []
        if not isinstance(spec.hf_config.get("vocab_size"), int):
            text = "the model's config needs vocab_size, the number of its embeddings"
            problems.append(Problem("", text))
        problems += _heads_problems(spec, "layout.tp", layout.tp)

        # Every pipeline stage has a layer at least.
        layers = spec.hf_config.get("num_hidden_layers")
        if isinstance(layers, int) and layers < layout.pp:
            text = f"is {layout.pp}, and the model has {layers} layers; make it smaller"
            problems.append(Problem("layout.pp", text))
        return problems

    def _spec(self, config: ModelConfig, kind: str, role: str) -> ModelSpec | None:
        """Resolve the model itself; None, with problems noted, where it cannot be read."""
        try:
            if config.path is not None and config.path.startswith(STAGE) and config.config is None:
                return self._from_stage(config, kind, role)
            return read_model(config, kind, role, weights=not self.reader.elsewhere)
        except Invalid as error:
            self.reader.problems += error.inside(f"{role}.model")
            return None

    def _from_stage(self, config: ModelConfig, kind: str, role: str) -> ModelSpec | None:
        """Resolve "stage:NAME/ROLE", the export of an earlier stage's role.

        Before that stage has run, the checks use the model that it begins with. Without
        "/ROLE" it is the role of the same name, else the first that is trained. Raises Invalid
        where there is no such stage or trained role; None where the stage itself has problems.
        """
        stage, _, source = str(config.path).removeprefix(STAGE).partition("/")
        if stage not in self.earlier:
            meant = did_you_mean(stage, self.earlier)
            stages = ", ".join(self.earlier) or "none"
            text = f"there is no earlier stage {stage!r}{meant} (earlier stages: {stages})"
            raise Invalid([Problem("path", text)])
        job = self.earlier[stage]
        if job is None:
            return None

        # Only trained models are exported.
        trained = [name for name, model in job.models.items() if model.spec.optimizer is not None]
        source = source or (role if role in trained or not trained else trained[0])
        if source not in trained:
            hint = f'; write "{STAGE}{stage}/{trained[0]}"' if trained else ""
            models = ", ".join(trained) or "no model"
            text = f"stage {stage!r} trains {models}, not {source!r}{hint}"
            raise Invalid([Problem("path", text)])
        export = str(job.folder / "export" / source)
        return attrs.evolve(job.models[source].spec.model, kind=kind, path=None, export=export)

    def _layout(self, role: str, asked: LayoutSection, pool: ResourcePool) -> ParallelLayout | None:
        """Fill the pool's ranks: dp = world / (tp x pp x cp); None where it does not divide."""
        # Experts are shared inside dp, so ep takes no ranks of its own.
        inner = asked.tp * asked.pp * asked.cp
        world = pool.world
        if world % inner or (asked.dp is not None and asked.dp * inner != world):
            self.reader.note(f"{role}.layout", _does_not_fit(role, asked, pool))
            return None
        try:
            return ParallelLayout(
                asked.pp, asked.tp, world // inner, asked.cp, asked.ep, asked.order
            )
        except ValueError as error:
            self.reader.note(f"{role}.layout", str(error))
            return None


def _beyond(backend: str, layout: ParallelLayout, kind: str) -> list[Problem]:
    """Return problems: axes of the layout and a kind of model that a backend does not support."""
    can = registry().training_capabilities(backend)
    problems = []
    for axis, size in attrs.asdict(layout).items():
        if axis not in can.axes | {"order"} and size > 1:
            axes = ", ".join(sorted(can.axes))
            text = f"is {size}, and the backend {backend} has the axes {axes}; set it to 1"
            problems.append(Problem(f"layout.{axis}", text))
    if kind not in can.models:
        kinds = ", ".join(sorted(can.models))
        text = f"the backend {backend} has models of kind {kinds}, and this one is a {kind}"
        problems.append(Problem("", text))
    return problems


def _heads_problems(spec: ModelSpec, key: str, tp: int) -> list[Problem]:
    """Return problems of a tensor parallel size that does not divide the attention heads."""
    heads = spec.hf_config.get("num_attention_heads")
    if not isinstance(heads, int) or heads % tp == 0:
        return []
    text = f"{tp} does not divide the model's {heads} attention heads; give a divisor of {heads}"
    return [Problem(key, text)]


def _does_not_fit(role: str, asked: LayoutSection, pool: ResourcePool) -> str:
    """Return the sentence that a layout does not fill its pool, with the remedies."""
    inner = asked.tp * asked.pp * asked.cp
    world = pool.world
    # Devices that the layout would fill; without dp the next multiple of tp x pp x cp.
    needs = inner * (asked.dp or -(-world // inner))

    # The remedies: leave dp out where that is enough, else change a size or the pool.
    dp = f"dp {asked.dp} x " if asked.dp else ""
    head = (
        f"{dp}tp {asked.tp} x pp {asked.pp} x cp {asked.cp} does not fit pool "
        f"{pool.name!r} of {world} device{'s' if world > 1 else ''}"
    )
    resize = f"set pools.{pool.name} = [{needs}]"
    if world % inner == 0:
        return f"{head}: leave out {role}.layout.dp (it is then {world // inner}), or {resize}"
    divisors = ", ".join(str(size) for size in range(1, world + 1) if world % size == 0)
    return f"{head}: tp x pp x cp must divide {world} ({divisors}); change it, or {resize}"


def _given(table: Mapping[str, Any], key: str) -> bool:
    """Return whether a table has a dotted key, or a value in which that key would lie."""
    value: Any = table
    for part in key.split("."):
        if not isinstance(value, Mapping):
            return True
        if part not in value:
            return False
        value = value[part]
    return True


def _mismatch_stop(spec: ModelSpec, backend: Any, engine: Any) -> float:
    """Return the nats by which an engine's logprobs may differ from the trainer's.

    The coarser of the two precisions decides.
    """
    # Plugins may name their precision differently: they get the strictest limit.
    precision = getattr(backend, "precision", "fp32")
    dtype = getattr(engine, "dtype", "float32")
    if precision == "fp32" and dtype == "float32":
        return 1e-3
    # Rounding may send a token to other experts.
    return 0.1 if any(spec.hf_config.get(key) for key in EXPERTS) else 0.05
