"""From a run's config to what the planner asks of it, and back: the work of a step, and pools and layouts as settings."""

from __future__ import annotations

import itertools
from collections.abc import MutableMapping
from typing import Any

import attrs

from hybridflow.core.errors import ConfigError, HybridFlowError
from hybridflow.core.job import Job, PlacedModel
from hybridflow.core.job.schema import SECTIONS
from hybridflow.core.mapping.cluster import Cluster, RunsOn
from hybridflow.core.mapping.pools import Choice, Entry, PoolPlanner, after, gigabytes
from hybridflow.core.mapping.search import Mapping, Pool
from hybridflow.core.mapping.trace import trace_step
from hybridflow.core.mapping.workload import MANY, PlannedModel, Workload
from hybridflow.core.parallel import ParallelLayout
from hybridflow.core.plugins import registry
from hybridflow.core.resharding.shapes import ModelShape
from hybridflow.core.storage import Storage


@attrs.frozen
class Plannable:
    """A job, as the planner sees it."""

    workload: Workload
    models: tuple[PlannedModel, ...]
    remarks: tuple[str, ...] = ()
    """What is not accounted for."""
    runs_on: dict[str, RunsOn] = attrs.field(factory=dict)


def check_ranks(job: Job, cluster: Cluster) -> None:
    """Raises ConfigError for more devices than the job's runtime can use."""
    one = registry().descriptor("runtime", job.runtime).capabilities.get("collectives") == "one rank"
    if one and cluster.devices > 1:
        raise ConfigError(
            f"runtime: {job.runtime} runs models on one rank, and the cluster has {cluster.devices} devices; plan for one "
            f"({cluster.nodes[0].device.name}:1x1), or set another runtime"
        )


def plannable(job: Job) -> Plannable:
    """Raises ConfigError for models whose shape is not known, and TraceError for a step that cannot be followed."""
    remarks: list[str] = []
    models, problems = [], []
    for name, placed in job.models.items():
        try:
            models.append(planned_model(name, placed, remarks))
        except HybridFlowError as error:
            problems.append(f"{name}.model: {_said(error)}")
    if problems:
        raise ConfigError(problems)
    names = {m.name for m in models}
    tasks = trace_step(type(job.algorithm)(job.algorithm.config))  # its own state stays as it is
    functions = sorted({t.role for t in tasks} - names)
    if functions:
        remarks.append(f"reward functions take no time here: {', '.join(functions)}")
    if not any(t.verb == "generate" for t in tasks):
        remarks.append("the lengths of given responses are not known: sampling.max_tokens stands for them")
    kept = tuple(t for t in tasks if t.role in names)
    work = Workload(kept, max(1, job.data.max_prompt_tokens), max(1, job.sampling.max_tokens))
    runs_on = {
        m.name: RunsOn(job.models[m.name].spec.backend, job.models[m.name].spec.engine, 8 * m.compute_bytes)
        for m in models
    }
    return Plannable(work, tuple(models), tuple(remarks), runs_on)


def _said(error: HybridFlowError) -> str:
    return "; ".join(error.problems) if isinstance(error, ConfigError) else str(error)


def planned_model(name: str, placed: PlacedModel, remarks: list[str]) -> PlannedModel:
    """A job's model as the planner sees it; `remarks` gets what is not accounted for."""
    spec, trained = placed.spec, placed.role.trained
    config, shape = spec.backend_config, ModelShape.of(spec.model.hf_config)
    says, takes = getattr(config, "storage", None), getattr(config, "takes", None)
    if says is None:
        remarks.append(
            f"{name}: the backend {spec.backend} does not say how it keeps a model (storage); planned as FSDP"
        )
    storage: Storage = says(trained) if says else Storage(sharding="fsdp")
    if storage.on_host or (trained and not storage.optimizer_bytes):
        remarks.append(f"{name}: what it has in the host's memory all the time takes no time to come from there, here")
    if spec.offload and not storage.moves:
        remarks.append(f"{name}: its backend does not offload it as it is; planned as staying on the device")
    axes = str(registry().descriptor("training_backend", spec.backend).capabilities.get("axes", "dp")).split(", ")
    return PlannedModel(
        name,
        shape,
        trained=trained,
        head="policy" if placed.role.kind == "policy" else "value",
        offload=spec.offload and storage.moves,
        micro_batch_tokens=spec.micro_batch_tokens,
        takes=takes and (lambda layout: takes(shape, ParallelLayout(*layout))),
        **(_engine(name, placed, remarks) if spec.engine is not None else {}),
        max_tp=MANY if "tp" in axes else 1,
        max_pp=MANY if "pp" in axes else 1,
        **attrs.asdict(storage),
    )


def _engine(name: str, placed: PlacedModel, remarks: list[str]) -> dict[str, Any]:
    """What is known of its engine's limits: from the settings that our engines share."""
    spec = placed.spec
    assert spec.engine is not None
    can, config = registry().descriptor("rollout_engine", spec.engine).capabilities, spec.engine_config
    width = 4 if getattr(config, "dtype", "bfloat16") == "float32" else 2
    found: dict[str, Any] = {"rollout_bytes": width, "max_sequences": getattr(config, "max_sequences", 0) or 256}
    cache, tokens = getattr(config, "kv_memory_gb", 0.0), getattr(config, "kv_tokens", 0)
    share, keeps = getattr(config, "gpu_memory", None), placed.section.generation.keep
    if cache:
        found |= {"cache_gb": cache, "keeps_engine": keeps}
    elif tokens:
        found["cache_tokens"] = tokens
    elif share is not None:
        found |= {"engine_share": share, "keeps_engine": keeps}
    if keeps and "engine_share" not in found:
        what = "the engine's weights are" if cache else "the engine's memory is"
        remarks.append(f"{name}: {what} taken to be free while models train (as with generation.keep = false)")
    return found | ({} if can.get("tp") else {"max_rollout_tp": 1}) | ({} if can.get("pp") else {"max_rollout_pp": 1})


@attrs.frozen
class Misfit:
    """Why a config does not fit a cluster."""

    why: str


@attrs.frozen
class NotPlanned:
    """Why nothing can be said of a config as it is."""

    why: str


def as_written(job: Job, work: Plannable, cluster: Cluster) -> Mapping | Misfit | NotPlanned:
    """The mapping that the config itself says, its pools on the kinds of nodes on which it is fastest."""
    if any(m.rollout_pool for m in job.models.values()):
        return NotPlanned("its engines are in a pool of their own, which is not planned")
    if any(m.layout.cp * m.layout.ep > 1 for m in job.models.values()):
        return NotPlanned("context and expert parallelism are not planned")
    pools = {n: p for n, p in job.pools.items() if any(m.pool == n for m in job.models.values())}
    asked, there = sum(p.world for p in pools.values()), cluster.devices
    if asked > there:
        return Misfit(f"it asks for {asked} devices, and there are {there}")
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
        for (name, pool), kind in zip(pools.items(), kinds, strict=True):
            members = {role: placed for role, placed in job.models.items() if placed.pool == name}
            entry = _entry(planners[kind], pool.world, members, {m.name: m for m in work.models})
            if isinstance(entry, Misfit):
                misfit = entry
                break
            found.append(Pool(entry, kind))
        else:
            stages = tuple(max((p.entry.times[s] for p in found), default=0.0) for s in range(3))
            if best is None or sum(stages) < best.seconds:
                best = Mapping(tuple(found), sum(stages), stages)  # type: ignore[arg-type]
    return best or misfit


def _entry(
    planner: PoolPlanner, devices: int, members: dict[str, PlacedModel], models: dict[str, PlannedModel]
) -> Entry | Misfit:
    options = [planner.option(models[r], (m.layout.pp, m.layout.tp, m.layout.dp)) for r, m in members.items()]
    have = planner.memory([o.model for o in options])
    resident = sum(o.bytes.resident for o in options)
    for stage, phase in (("training", "trains"), ("inference", "reads")):
        for option in options:
            need = resident + getattr(option.bytes, stage)
            if need > have:
                return Misfit(
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
        engine = planner.engine(option, devices, resident, (generation.pp, generation.tp))
        if engine is None:
            return Misfit(
                f"{option.model.name} has no room for its engine: {gigabytes(resident)} of {gigabytes(planner.nodes.memory)} "
                "per device are taken, and the engine's weights and the cache of one sequence need more than the rest, or "
                "than the engine's own limits (gpu_memory, kv_memory_gb) leave"
            )
        choices.append(engine)
        seconds += engine.seconds
    moved = planner.moved([o.model for o in options])
    infer, train = after(moved, sum(o.infer for o in options), sum(o.train for o in options))
    return Entry(devices, (seconds, infer, train), tuple(choices))


def settings(mapping: Mapping, cluster: Cluster) -> dict[str, Any]:
    """A mapping as tables of a config: pools, and of each role its pool, layout and generation layout."""
    tables: dict[str, Any] = {"pools": {}}
    alone = len(mapping.pools) == 1
    for pool in mapping.pools:
        name = "main" if alone else pool.names[0]
        per_node = cluster.nodes[pool.kind].per_node
        devices = pool.entry.devices
        tables["pools"][name] = [devices] if devices <= per_node else [per_node] * (devices // per_node)
        for choice in pool.entry.choices:
            pp, tp, dp = choice.option.layout
            table: dict[str, Any] = {"pool": name, "layout": {"pp": pp, "tp": tp, "dp": dp}}
            if choice.rollout is not None:
                table["generation"] = {"pp": choice.rollout[0], "tp": choice.rollout[1]}
            tables[choice.option.model.name] = table
    return tables


def replace_places(tables: Any, settled: dict[str, Any]) -> None:
    """Put `settings` into tables of a config, in place: sizes and pools are replaced; how an engine or a layout is otherwise
    (grouping, keep, order) stays."""
    forget_places(tables)
    tables["pools"] = settled["pools"]
    for role, own in settled.items():
        if role == "pools":
            continue
        if not isinstance(tables.get(role), MutableMapping):
            tables[role] = {}
        for key, value in own.items():
            there = tables[role].get(key)
            if isinstance(value, dict) and isinstance(there, MutableMapping):
                there.update(value)
            else:
                tables[role][key] = value


def forget_places(tables: Any) -> None:
    """Drop the pools, and of every table that is no section (so a role's) its pool and sizes, in place."""
    tables.pop("pools", None)
    for role, table in tables.items():
        if role in SECTIONS or not isinstance(table, MutableMapping):
            continue
        table.pop("pool", None)
        for key, sizes in (("layout", ("pp", "tp", "dp", "cp", "ep")), ("generation", ("pp", "tp", "pool"))):
            if isinstance(inner := table.get(key), MutableMapping):
                for size in sizes:
                    inner.pop(size, None)
                if not inner:
                    table.pop(key)
