"""Conversion of a run's job to the planner's input, and of a mapping to settings.

A job becomes the work of a step (trace.py) and the models that do it; a mapping becomes the tables
`pools`, `layout` and `generation` of a config.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping as Table, Sequence
from typing import Any, Literal

import attrs

from hybridflow.core.contracts.planner import NotPlanned, PlannableJob
from hybridflow.core.contracts.rollout import EngineSettings, engine_settings
from hybridflow.core.contracts.runtime import ResourcePool
from hybridflow.core.contracts.training import Packing, TrainingSettings, training_settings
from hybridflow.core.errors import ConfigError, HybridFlowError
from hybridflow.core.job.job import PlacedModel
from hybridflow.core.plugins import registry
from hybridflow.core.values.model_shape import ModelShape, ModelSize
from hybridflow.planner.cluster import Cluster, Nodes, RunsOn, read_cluster
from hybridflow.planner.needs import Member, pool_memory
from hybridflow.planner.pools import FilledPool, LayoutChoice, PoolPlanner, after
from hybridflow.planner.search import Fronts, Mapping, PlannedPool, plan_mapping, slowest
from hybridflow.planner.trace import trace_step
from hybridflow.planner.workload import PlannedModel, Task, Workload


@attrs.frozen
class Plannable:
    """A job, as the planner sees it."""

    workload: Workload
    models: tuple[PlannedModel, ...]
    of_models: tuple[str, ...] = ()
    """Sentences on what the plan does not account for in the models."""
    of_step: tuple[str, ...] = ()
    """Sentences on what it does not account for in the step."""
    device: str = "cuda"
    """Kind of the devices: "cpu" or "cuda"."""
    runs_on: dict[str, RunsOn] = attrs.field(factory=dict)
    """The backend, the engine and the precision of each model."""
    _known: dict[int, tuple[PlacedModel, PlannedModel, tuple[str, ...]]] = attrs.field(
        factory=dict, repr=False, eq=False, alias="known"
    )
    """For the identity of each placed model that it was asked for: the model as it is planned, the
    same object each time, and sentences on it."""

    @property
    def remarks(self) -> tuple[str, ...]:
        """Sentences on what the plan does not account for."""
        return (*self.of_models, *self.of_step)

    def of(self, models: Table[str, PlacedModel]) -> Plannable:
        """Return the same step with models of other settings. Raises NotPlanned."""
        remarks: list[str] = []
        planned = self._planned(models, remarks)
        runs_on = {model.name: _runs_on(models[model.name], model) for model in planned}
        return attrs.evolve(self, models=planned, of_models=tuple(remarks), runs_on=runs_on)

    def _planned(
        self, placed_models: Table[str, PlacedModel], remarks: list[str]
    ) -> tuple[PlannedModel, ...]:
        """Return the models, and append to `remarks` what the plan does not account for.

        Raises NotPlanned with the problems of all models.
        """
        # Collect the problems of all models, so that one run shows them all.
        models = []
        problems = []
        for name, placed in placed_models.items():
            try:
                if id(placed) not in self._known:
                    said: list[str] = []
                    model = planned_model(name, placed, said, self.device)
                    self._known[id(placed)] = placed, model, tuple(said)
                _, model, sentences = self._known[id(placed)]
                models.append(model)
                remarks += sentences
            except HybridFlowError as error:
                reasons = error.problems if isinstance(error, ConfigError) else [str(error)]
                problems.append(f"{name}.model: {'; '.join(reasons)}")
        if problems:
            raise NotPlanned("\n".join(problems))
        return tuple(models)


@attrs.frozen
class JobPlan:
    """A job on a cluster, of which `plan`, placement, what-if tables and predictions are made."""

    job: PlannableJob
    cluster: Cluster
    work: Plannable
    pools: tuple[str, ...] = ()
    """For each kind of nodes, the name of the pool on it, where that is decided; else empty."""
    _fronts: dict[tuple[Nodes, Workload], Fronts] = attrs.field(
        factory=dict, repr=False, eq=False, alias="fronts"
    )
    """What searches have found, also for the job with other settings."""

    def best(self, alternatives: int = 0, cluster: Cluster | None = None) -> Mapping:
        """Return the fastest mapping here, or on another cluster. Raises NothingFitsError."""
        cluster = cluster or self.cluster
        workload = self.work.workload
        fronts = [
            self._fronts.setdefault((nodes, workload), Fronts(nodes, workload))
            for nodes in cluster.nodes
        ]
        return plan_mapping(cluster, workload, self.work.models, alternatives, fronts)

    def written(self) -> Mapping:
        """Return the mapping that the job's own settings describe. Raises Misfit and NotPlanned."""
        return as_written(self.job, self.work, self.cluster, self.pools)


class Misfit(HybridFlowError):
    """A config does not fit a cluster; the message has the reason."""


def plan_job(job: PlannableJob, cluster: str) -> JobPlan:
    """Return the job on the cluster that a text names.

    Raises ConfigError for a job or a cluster that cannot be read, and NotPlanned for a step that
    cannot be traced and for models whose shape is not known.
    """
    return JobPlan(job, read_cluster(cluster), plannable(job))


def check_ranks(job: PlannableJob, cluster: Cluster) -> None:
    """Raise ConfigError for more devices than the job's runtime can use."""
    # Most runtimes have no limit.
    most = registry().runtime_capabilities(job.runtime).max_ranks
    if most is None or cluster.devices <= most:
        return

    ranks = "one rank" if most == 1 else f"at most {most} ranks"
    number = "one" if most == 1 else str(most)
    raise ConfigError(
        f"runtime: {job.runtime} runs models on {ranks}, and the cluster has {cluster.devices} "
        f"devices; plan for {number} ({cluster.nodes[0].device.name}:1x{most}), or set another "
        "runtime"
    )


def plannable(job: PlannableJob) -> Plannable:
    """Return the work of the job's step, and its models.

    Raises NotPlanned for models whose shape is not known, and for a step that cannot be traced.
    """
    # A fresh algorithm takes the step, so that the state of the job's own stays as it is.
    tasks = trace_step(type(job.algorithm)(job.algorithm.config))

    # Lengths are the longest that the settings allow.
    names = set(job.models)
    kept = tuple(task for task in tasks if task.role in names)
    prompt_tokens = max(1, job.data.max_prompt_tokens)
    work = Workload(
        kept,
        prompt_tokens,
        max(1, job.sampling.max_tokens),
        open_steps=1 + job.run.max_staleness if job.carried else 1,
    )
    unseen = tuple(_unseen_work(tasks, names, job.data.max_prompt_tokens))
    return Plannable(work, (), of_step=unseen, device=job.device).of(job.models)


def _unseen_work(tasks: Sequence[Task], names: set[str], prompt_limit: int) -> list[str]:
    """Remarks on the work of a step whose time or lengths the planner cannot know."""
    # Roles that no model fills are reward functions.
    remarks = []
    functions = sorted({task.role for task in tasks} - names)
    if functions:
        remarks.append(f"reward functions take no time here: {', '.join(functions)}")
    if not prompt_limit:
        remarks.append(
            "data.max_prompt_tokens sets no limit: prompts are planned as one token each"
        )
    if not any(task.verb == "generate" for task in tasks):
        remarks.append(
            "the lengths of given responses are not known: sampling.max_tokens stands for them"
        )
    return remarks


def _runs_on(placed: PlacedModel, model: PlannedModel) -> RunsOn:
    bits = 8 * model.execution.compute_bytes
    return RunsOn(placed.spec.backend, placed.spec.engine, bits)


def planned_model(
    name: str, placed: PlacedModel, remarks: list[str], device: str = "cuda"
) -> PlannedModel:
    """Return a job's model as the planner sees it; `remarks` gets what is not accounted for."""
    spec = placed.spec
    trained = placed.role.trained
    settings = training_settings(spec.backend_config)
    runs = settings.execution(trained)

    # Figures that a backend does not state are assumed, with a remark.
    if type(settings).footprint is TrainingSettings.footprint:
        remarks.append(
            f"{name}: the backend {spec.backend} does not say how it spreads a model; planned as "
            "whole per rank"
        )
    if runs.from_host:
        remarks.append(
            f"{name}: what it has in the host's memory all the time takes no time to come from "
            "there, here"
        )
    if spec.offload and not runs.offloads:
        remarks.append(
            f"{name}: its backend does not offload it as it is; planned as staying on the device"
        )

    shape = _shape(placed)
    if shape.experts:
        remarks.append(
            f"{name}: a layer's {shape.experts} experts are planned as one grouped product, as "
            "transformers and the engines compute them on devices from Ampere on"
        )

    # Reward and cost models have a value head, as critics do.
    head: Literal["policy", "value"] = "policy" if placed.role.kind == "policy" else "value"
    return PlannedModel(
        name,
        ModelSize(shape, head, runs.adapter_rank),
        settings,
        trained=trained,
        offload=spec.offload and runs.offloads,
        micro_batch_tokens=spec.micro_batch_tokens,
        axes=registry().training_capabilities(spec.backend).axes,
        shares_prompts=settings.packing(spec.model.hf_config)[0] is Packing.SHARED,
        **(_engine(name, placed, remarks, device) if spec.engine is not None else {}),
    )


def _shape(placed: PlacedModel) -> ModelShape:
    spec = placed.spec
    return training_settings(spec.backend_config).model_shape(spec.model.hf_config)


def _engine(name: str, placed: PlacedModel, remarks: list[str], device: str) -> dict[str, Any]:
    """Return the fields of PlannedModel that depend on its engine: limits, sizes, kept memory."""
    spec = placed.spec
    assert spec.engine is not None
    settings = engine_settings(spec.engine_config)
    can = registry().engine_capabilities(spec.engine)
    limits = settings.limits(device)
    if type(settings).limits is EngineSettings.limits:
        remarks.append(f"{name}: the engine {spec.engine} does not say what it takes of a device")

    # Engines that do not shard along an axis have one rank of it.
    fields: dict[str, Any] = {
        "limits": limits,
        # In a pool of its own an engine never sleeps.
        "keeps_engine": placed.section.generation.keep or placed.rollout_pool is not None,
    }
    if spec.sync.alias:
        fields["lent_params"] = settings.lent_params(_shape(placed), device)
    if not can.tp:
        fields["max_rollout_tp"] = 1
    if not can.pp:
        fields["max_rollout_pp"] = 1
    return fields


def as_written(
    job: PlannableJob, work: Plannable, cluster: Cluster, decided: Sequence[str] = ()
) -> Mapping:
    """Return the mapping that the config itself describes.

    Each pool is on the kind of nodes whose index is that of the pool's name in `decided`; without
    `decided` on the kinds with the fastest step. Raises Misfit, and NotPlanned for settings that
    the planner has no figures of.
    """
    # The cost model does not cover these.
    if any(m.rollout_pool for m in job.models.values()):
        raise NotPlanned("its engines are in a pool of their own, which is not planned")
    if any(m.layout.cp * m.layout.ep > 1 for m in job.models.values()):
        raise NotPlanned("context and expert parallelism are not planned")

    # Pools without models take no devices.
    used = {placed.pool for placed in job.models.values()}
    pools = {name: pool for name, pool in job.pools.items() if name in used}
    asked = sum(pool.world for pool in pools.values())
    if asked > cluster.devices:
        raise Misfit(f"it asks for {asked} devices, and there are {cluster.devices}")

    # Every way to put the pools on kinds of nodes; the reason of the last that fails is reported.
    planners = [PoolPlanner(nodes, work.workload) for nodes in cluster.nodes]
    best: Mapping | None = None
    misfit = Misfit("its pools do not fit the nodes of any kind")
    every: Iterable[tuple[int, ...]] = itertools.product(range(len(planners)), repeat=len(pools))
    if decided:
        every = [tuple(decided.index(name) for name in pools)]
    for kinds in every:
        if not _enough_devices(planners, pools, kinds):
            continue
        # Another kind may have the memory that this one lacks.
        try:
            entries = [
                PlannedPool(_pool_entry(planners[kind], job, name, work), kind)
                for name, kind in zip(pools, kinds, strict=True)
            ]
        except Misfit as error:
            misfit = error
            continue

        stages = slowest([pool.entry.times for pool in entries])
        if best is None or sum(stages) < best.seconds:
            best = Mapping(tuple(entries), sum(stages), stages)
    if best is None:
        raise misfit
    return best


def _enough_devices(
    planners: Sequence[PoolPlanner], pools: Table[str, ResourcePool], kinds: Sequence[int]
) -> bool:
    """Return whether each kind of nodes has the devices of the pools that are put on it."""
    # Numbers of devices alone are compared, not how the pools pack into nodes.
    left = [planner.nodes.devices for planner in planners]
    for pool, kind in zip(pools.values(), kinds, strict=True):
        left[kind] -= pool.world
    return min(left) >= 0


def _pool_entry(planner: PoolPlanner, job: PlannableJob, name: str, work: Plannable) -> FilledPool:
    """Return a pool of the job, with its models as they are placed. Raises Misfit."""
    members = {role: placed for role, placed in job.models.items() if placed.pool == name}
    models = {model.name: model for model in work.models}
    return _entry(planner, name, job.pools[name].world, members, models, work.device)


def _entry(
    planner: PoolPlanner,
    name: str,
    devices: int,
    members: dict[str, PlacedModel],
    models: dict[str, PlannedModel],
    device: str,
) -> FilledPool:
    """Return a pool whose layouts are given. Raises Misfit where its memory is not enough."""
    placed = [
        Member(models[role], planner.option(models[role], one.layout), one.generation)
        for role, one in members.items()
    ]
    memory = pool_memory(planner, name, placed, yields=device != "cpu")
    if not memory.fits:
        refused = memory.refused and device != "cpu"
        verdict = "refuses to start" if refused else "warns, and tries"
        raise Misfit(f"{memory.problem} (a run {verdict})")

    # Engines, beside what all models keep on the devices.
    options = [member.option for member in placed if member.option is not None]
    resident = sum(option.bytes.resident for option in options)
    most = max(option.most for option in options)
    seconds = 0.0
    choices = []
    for member, option in zip(placed, options, strict=True):
        if not planner.generates(member.model) or member.engines is None:
            choices.append(LayoutChoice(option))
            continue
        engine = planner.engine(option, devices, resident, member.engines, most)
        if engine is None:
            raise Misfit(
                f"{member.model.name} has no room for its engine: its own limits leave no room for "
                "one sequence beside its weights"
            )
        choices.append(engine)
        seconds += engine.seconds

    # Models of a pool work one after the other.
    inference = sum(option.infer for option in options)
    training = sum(option.train for option in options)
    moved = planner.moved([option.model for option in options])
    return FilledPool(devices, (seconds, *after(moved, inference, training)), tuple(choices))


def settings_of(mapping: Mapping, cluster: Cluster) -> dict[str, Any]:
    """Return a mapping as tables of a config: `pools`, and for each role its pool and layouts."""
    tables: dict[str, Any] = {"pools": {}}
    alone = len(mapping.pools) == 1
    for pool in mapping.pools:
        # A pool is a part of one node, or whole nodes.
        name = "main" if alone else pool.names[0]
        devices = pool.entry.devices
        per_node = cluster.nodes[pool.kind].per_node
        whole_nodes = [per_node] * (devices // per_node)
        tables["pools"][name] = [devices] if devices <= per_node else whole_nodes

        # The pool and layout of each role, and those of its engine where it generates.
        for choice in pool.entry.choices:
            layout = choice.option.layout
            table: dict[str, Any] = {
                "pool": name,
                "layout": {"pp": layout.pp, "tp": layout.tp, "dp": layout.dp},
            }
            if choice.engines is not None:
                table["generation"] = {"pp": choice.engines.pp, "tp": choice.engines.tp}
            tables[choice.option.model.name] = table
    return tables
