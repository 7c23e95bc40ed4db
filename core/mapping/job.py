"""From a run's config to what the planner asks of it, and back: the work of a step, and pools and layouts as settings."""

from __future__ import annotations

from typing import Any

import attrs

from hybridflow.core.errors import ConfigError, HybridFlowError
from hybridflow.core.job import Job, PlacedModel
from hybridflow.core.mapping.cluster import Cluster
from hybridflow.core.mapping.pools import Choice, Entry, PoolPlanner
from hybridflow.core.mapping.search import Mapping, Pool
from hybridflow.core.mapping.trace import trace_step
from hybridflow.core.mapping.workload import PlannedModel, Workload
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


def plannable(job: Job) -> Plannable:
    """Raises ConfigError for models whose shape is not known, and TraceError for a step that cannot be followed."""
    remarks: list[str] = []
    models, problems = [], []
    for name, placed in job.models.items():
        try:
            models.append(_model(name, placed, remarks))
        except HybridFlowError as error:
            problems.append(f"{name}.model: {_said(error)}")
    if problems:
        raise ConfigError(problems)
    names = {m.name for m in models}
    tasks = trace_step(job.algorithm)
    functions = sorted({t.role for t in tasks} - names)
    if functions:
        remarks.append(f"reward functions take no time here: {', '.join(functions)}")
    if not any(t.verb == "generate" for t in tasks):
        remarks.append("the lengths of given responses are not known: sampling.max_tokens stands for them")
    kept = tuple(t for t in tasks if t.role in names)
    work = Workload(kept, max(1, job.data.max_prompt_tokens), max(1, job.sampling.max_tokens))
    return Plannable(work, tuple(models), tuple(remarks))


def _said(error: HybridFlowError) -> str:
    return "; ".join(error.problems) if isinstance(error, ConfigError) else str(error)


def _model(name: str, placed: PlacedModel, remarks: list[str]) -> PlannedModel:
    spec, trained = placed.spec, placed.role.trained
    says = getattr(spec.backend_config, "storage", None)
    if says is None:
        remarks.append(
            f"{name}: the backend {spec.backend} does not say how it keeps a model (storage); planned as FSDP"
        )
    storage: Storage = says(trained) if says else Storage(sharding="fsdp")
    axes = str(registry().descriptor("training_backend", spec.backend).capabilities.get("axes", "dp")).split(", ")
    engine: dict[str, Any] = {}
    if spec.engine is not None:
        can = registry().descriptor("rollout_engine", spec.engine).capabilities
        wide = getattr(spec.engine_config, "dtype", "bfloat16") == "float32"
        engine = {"rollout_bytes": 4 if wide else 2}
        engine |= {} if can.get("tp") else {"max_rollout_tp": 1}
        engine |= {} if can.get("pp") else {"max_rollout_pp": 1}
    return PlannedModel(
        name,
        ModelShape.of(spec.model.hf_config),
        trained=trained,
        head="policy" if placed.role.kind == "policy" else "value",
        offload=spec.offload,
        micro_batch_tokens=spec.micro_batch_tokens,
        **engine,
        **({} if "tp" in axes else {"max_tp": 1}),
        **({} if "pp" in axes else {"max_pp": 1}),
        **attrs.asdict(storage),
    )


def as_written(job: Job, work: Plannable, cluster: Cluster) -> Mapping | str:
    """The mapping that the config itself says, on the cluster's first kind of nodes; or why it has none: too few devices, or
    too little memory, with the numbers."""
    planner = PoolPlanner(cluster.nodes[0], work.workload, work.models)
    asked = sum(pool.world for pool in job.pools.values())
    if asked > planner.nodes.devices:
        return f"asks for {asked} devices, and there are {planner.nodes.devices}"
    by_name = {m.name: m for m in work.models}
    pools = []
    for name, pool in job.pools.items():
        members = {role: placed for role, placed in job.models.items() if placed.pool == name}
        if not members:
            continue
        choices = []
        for role, placed in members.items():
            layout = (placed.layout.pp, placed.layout.tp, placed.layout.dp * placed.layout.cp)
            choices.append(Choice(planner.option(by_name[role], layout)))
        entry = _entry(planner, pool.world, choices, members)
        if isinstance(entry, str):
            return entry
        pools.append(Pool(entry, 0))
    stages = tuple(max((p.entry.times[s] for p in pools), default=0.0) for s in range(3))
    return Mapping(tuple(pools), sum(stages), stages)  # type: ignore[arg-type]


def _entry(planner: PoolPlanner, devices: int, choices: list[Choice], members: dict[str, PlacedModel]) -> Entry | str:
    have = planner.nodes.memory
    resident = sum(c.option.bytes.resident for c in choices)
    for stage, phase in (("training", "trains"), ("inference", "reads")):
        for choice in choices:
            need = resident + getattr(choice.option.bytes, stage)
            if need > have:
                return (
                    f"{choice.option.model.name} needs {need / 1e9:.1f} GB per device while it {phase}, of which "
                    f"{resident / 1e9:.1f} GB are weights, gradients and optimizers, and {have / 1e9:.1f} GB are usable"
                )
    seconds, made = 0.0, []
    for choice in choices:
        model, placed = choice.option.model, members[choice.option.model.name]
        if not planner.generates(model):
            made.append(choice)
            continue
        if placed.generation is None or placed.rollout_pool:
            return "has its engines in a pool of their own, which is not planned"
        rollout = (placed.generation.pp, placed.generation.tp)
        engine = planner.engine(choice.option, devices, have - resident, rollout)
        if engine is None:
            return (
                f"{model.name} has no room for its engine: {resident / 1e9:.1f} of {have / 1e9:.1f} GB per device are taken, "
                f"the engine's weights and the cache of one sequence need more than the rest"
            )
        made.append(engine)
        seconds += engine.seconds
    moved = planner.moved([c.option.model for c in choices])
    infer, train = sum(c.option.infer for c in choices), sum(c.option.train for c in choices)
    infer, train = (infer + moved, train) if infer else (infer, train + moved if train else 0.0)
    return Entry(devices, (seconds, infer, train), tuple(made))


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
