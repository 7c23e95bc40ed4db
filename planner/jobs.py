"""From a run's job to what the planner asks of it, and back: the work of a step, and pools and layouts as settings."""

from __future__ import annotations

import itertools
from typing import Any, Literal

import attrs

from hybridflow.core.contracts.planner import NotPlanned, PlannableJob
from hybridflow.core.contracts.rollout import EngineSettings, engine_settings
from hybridflow.core.contracts.training import TrainingSettings, training_settings
from hybridflow.core.errors import ConfigError, HybridFlowError
from hybridflow.core.job.job import PlacedModel
from hybridflow.core.plugins import registry
from hybridflow.core.values.model_shape import ModelSize
from hybridflow.planner.cluster import Cluster, RunsOn, gigabytes, read_cluster
from hybridflow.planner.pools import Choice, Entry, PoolPlanner, after
from hybridflow.planner.search import Mapping, NothingFitsError, Pool, describe, plan_mapping
from hybridflow.planner.trace import trace_step
from hybridflow.planner.workload import PlannedModel, Workload


@attrs.frozen
class Plannable:
    """A job, as the planner sees it."""

    workload: Workload
    models: tuple[PlannedModel, ...]
    remarks: tuple[str, ...] = ()
    """What is not accounted for."""
    runs_on: dict[str, RunsOn] = attrs.field(factory=dict)


@attrs.frozen
class JobPlan:
    """A job on a cluster: what `plan`, placement, what-if and predictions have in common."""

    job: PlannableJob
    cluster: Cluster
    work: Plannable

    def best(self, alternatives: int = 0, cluster: Cluster | None = None) -> Mapping:
        """The fastest mapping there, or on another cluster. Raises NothingFitsError."""
        return plan_mapping(
            cluster or self.cluster, self.work.workload, self.work.models, alternatives
        )

    def written(self) -> Mapping:
        """The mapping that the job itself says. Raises Misfit, NotPlanned."""
        return as_written(self.job, self.work, self.cluster)

    def misfit(self) -> str | None:
        """Why the job does not fit as it is, and what fits; None where it does. Raises NotPlanned."""
        try:
            self.written()
        except Misfit as error:
            return f"the config does not fit its cluster: {error}; {self._what_fits()}"
        return None

    def _what_fits(self) -> str:
        try:
            fits = describe(self.best())
        except NothingFitsError as error:
            return f"nothing fits: {error.problems[0]}"
        return f'this fits: {fits} (`hybridflow plan` writes it; placement = "auto" takes it)'


class Misfit(HybridFlowError):
    """Why a config does not fit a cluster."""


def plan_job(job: PlannableJob, cluster: str) -> JobPlan:
    """A job and the text of a cluster, read. Raises ConfigError for either that cannot be, NotPlanned for a step that cannot be
    followed and models whose shape is not known."""
    return JobPlan(job, read_cluster(cluster), plannable(job))


def check_ranks(job: PlannableJob, cluster: Cluster) -> None:
    """Raises ConfigError for more devices than the job's runtime can use."""
    most = registry().runtime_capabilities(job.runtime).max_ranks
    if most is not None and cluster.devices > most:
        ranks, one = ("one rank", "one") if most == 1 else (f"at most {most} ranks", str(most))
        raise ConfigError(
            f"runtime: {job.runtime} runs models on {ranks}, and the cluster has {cluster.devices} devices; plan for {one} "
            f"({cluster.nodes[0].device.name}:1x{most}), or set another runtime"
        )


def plannable(job: PlannableJob) -> Plannable:
    """Raises NotPlanned for models whose shape is not known, and for a step that cannot be followed."""
    remarks: list[str] = []
    models, problems = [], []
    for name, placed in job.models.items():
        try:
            models.append(planned_model(name, placed, remarks))
        except HybridFlowError as error:
            said = error.problems if isinstance(error, ConfigError) else [str(error)]
            problems.append(f"{name}.model: {'; '.join(said)}")
    if problems:
        raise NotPlanned("\n".join(problems))
    names = {m.name for m in models}
    tasks = trace_step(type(job.algorithm)(job.algorithm.config))  # its own state stays as it is
    functions = sorted({t.role for t in tasks} - names)
    if functions:
        remarks.append(f"reward functions take no time here: {', '.join(functions)}")
    if not any(t.verb == "generate" for t in tasks):
        remarks.append(
            "the lengths of given responses are not known: sampling.max_tokens stands for them"
        )
    kept = tuple(t for t in tasks if t.role in names)
    work = Workload(kept, max(1, job.data.max_prompt_tokens), max(1, job.sampling.max_tokens))
    runs_on = {
        m.name: RunsOn(
            job.models[m.name].spec.backend,
            job.models[m.name].spec.engine,
            8 * m.execution.compute_bytes,
        )
        for m in models
    }
    return Plannable(work, tuple(models), tuple(remarks), runs_on)


def planned_model(name: str, placed: PlacedModel, remarks: list[str]) -> PlannedModel:
    """A job's model as the planner sees it; `remarks` gets what is not accounted for."""
    spec, trained = placed.spec, placed.role.trained
    settings = training_settings(spec.backend_config)
    if type(settings).footprint is TrainingSettings.footprint:
        remarks.append(
            f"{name}: the backend {spec.backend} does not say how it spreads a model; planned as whole per rank"
        )
    runs = settings.execution(trained)
    if runs.from_host:
        remarks.append(
            f"{name}: what it has in the host's memory all the time takes no time to come from there, here"
        )
    if spec.offload and not runs.offloads:
        remarks.append(
            f"{name}: its backend does not offload it as it is; planned as staying on the device"
        )
    head: Literal["policy", "value"] = "policy" if placed.role.kind == "policy" else "value"
    return PlannedModel(
        name,
        ModelSize(settings.model_shape(spec.model.hf_config), head, runs.adapter_rank),
        settings,
        trained=trained,
        offload=spec.offload and runs.offloads,
        micro_batch_tokens=spec.micro_batch_tokens,
        axes=registry().training_capabilities(spec.backend).axes,
        **(_engine(name, placed, remarks) if spec.engine is not None else {}),
    )


def _engine(name: str, placed: PlacedModel, remarks: list[str]) -> dict[str, Any]:
    """What is known of its engine, and whether its memory stays between generations."""
    spec = placed.spec
    assert spec.engine is not None
    settings = engine_settings(spec.engine_config)
    can, limits = registry().engine_capabilities(spec.engine), settings.limits()
    if type(settings).limits is EngineSettings.limits:
        remarks.append(f"{name}: the engine {spec.engine} does not say what it takes of a device")
    keeps = placed.section.generation.keep
    limited = limits.cache_gb is not None or limits.memory_share is not None
    if keeps and limits.memory_share is None:
        what = "the engine's weights are" if limits.cache_gb else "the engine's memory is"
        remarks.append(
            f"{name}: {what} taken to be free while models train (as with generation.keep = false)"
        )
    found: dict[str, Any] = {"limits": limits, "keeps_engine": keeps and limited}
    return (
        found
        | ({} if can.tp else {"max_rollout_tp": 1})
        | ({} if can.pp else {"max_rollout_pp": 1})
    )


def as_written(job: PlannableJob, work: Plannable, cluster: Cluster) -> Mapping:
    """The mapping that the config itself says, its pools on the kinds of nodes on which it is fastest.

    Raises Misfit, and NotPlanned for what the planner has no figures of.
    """
    if any(m.rollout_pool for m in job.models.values()):
        raise NotPlanned("its engines are in a pool of their own, which is not planned")
    if any(m.layout.cp * m.layout.ep > 1 for m in job.models.values()):
        raise NotPlanned("context and expert parallelism are not planned")
    pools = {n: p for n, p in job.pools.items() if any(m.pool == n for m in job.models.values())}
    asked, there = sum(p.world for p in pools.values()), cluster.devices
    if asked > there:
        raise Misfit(f"it asks for {asked} devices, and there are {there}")
    planners = [PoolPlanner(nodes, work.workload, work.models) for nodes in cluster.nodes]
    best: Mapping | None = None
    misfit = Misfit("its pools do not fit the nodes of any kind")
    for kinds in itertools.product(range(len(planners)), repeat=len(pools)):
        used = [
            sum(p.world for p, k in zip(pools.values(), kinds, strict=True) if k == kind)
            for kind in range(len(planners))
        ]
        if any(u > planner.nodes.devices for u, planner in zip(used, planners, strict=True)):
            continue
        found = []
        try:
            for (name, pool), kind in zip(pools.items(), kinds, strict=True):
                members = {
                    role: placed for role, placed in job.models.items() if placed.pool == name
                }
                entry = _entry(
                    planners[kind], pool.world, members, {m.name: m for m in work.models}
                )
                found.append(Pool(entry, kind))
        except Misfit as error:
            misfit = error
            continue
        stages = tuple(max((p.entry.times[s] for p in found), default=0.0) for s in range(3))
        if best is None or sum(stages) < best.seconds:
            best = Mapping(tuple(found), sum(stages), stages)  # type: ignore[arg-type]
    if best is None:
        raise misfit
    return best


def _entry(
    planner: PoolPlanner,
    devices: int,
    members: dict[str, PlacedModel],
    models: dict[str, PlannedModel],
) -> Entry:
    """Raises Misfit."""
    options = [planner.option(models[role], placed.layout) for role, placed in members.items()]
    have = planner.memory([o.model for o in options])
    resident = sum(o.bytes.resident for o in options)
    for phase, needs in (
        ("trains", [o.bytes.training for o in options]),
        ("reads", [o.bytes.inference for o in options]),
    ):
        for option, more in zip(options, needs, strict=True):
            need = resident + more
            if need > have:
                raise Misfit(
                    f"{option.model.name} needs {gigabytes(need)} per device while it {phase}, of which "
                    f"{gigabytes(resident + option.bytes.fetched)} are weights, gradients and optimizers, and "
                    f"{gigabytes(have)} are usable{planner.engines_keep([o.model for o in options])}"
                )
    seconds, choices = 0.0, []
    for option in options:
        generation = members[option.model.name].generation
        if not planner.generates(option.model) or generation is None:
            choices.append(Choice(option))
            continue
        engine = planner.engine(option, devices, resident, generation)
        if engine is None:
            raise Misfit(
                f"{option.model.name} has no room for its engine: {gigabytes(resident)} of {gigabytes(planner.nodes.memory)} "
                "per device are taken, and the engine's weights and the cache of one sequence need more than the rest, or "
                "than the engine's own limits leave"
            )
        choices.append(engine)
        seconds += engine.seconds
    moved = planner.moved([o.model for o in options])
    infer, train = after(moved, sum(o.infer for o in options), sum(o.train for o in options))
    return Entry(devices, (seconds, infer, train), tuple(choices))


def settings_of(mapping: Mapping, cluster: Cluster) -> dict[str, Any]:
    """A mapping as tables of a config: pools, and of each role its pool, layout and generation layout."""
    tables: dict[str, Any] = {"pools": {}}
    alone = len(mapping.pools) == 1
    for pool in mapping.pools:
        name = "main" if alone else pool.names[0]
        per_node = cluster.nodes[pool.kind].per_node
        devices = pool.entry.devices
        tables["pools"][name] = (
            [devices] if devices <= per_node else [per_node] * (devices // per_node)
        )
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
