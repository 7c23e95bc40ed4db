"""A plan in words: why this one, what limits it, the next best; and its step as bars."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hybridflow.core.contracts.planner import (
    STAGE_NAMES,
    STAGES,
    Bar,
    Block,
    Line,
    NotPlanned,
    Table,
)
from hybridflow.core.values.units import seconds
from hybridflow.planner.cluster import GB, Cluster
from hybridflow.planner.jobs import JobPlan, Misfit, Plannable
from hybridflow.planner.search import Mapping, NothingFitsError, Pool, describe


def kinds_of(cluster: Cluster) -> str:
    """The cluster in a line."""
    kinds = [
        f"{n.count} x {n.per_node} {n.device.name} ({n.memory / GB:.1f} of {n.device.memory_gb:g} GB usable, "
        f"{n.figures} figures)"
        for n in cluster.nodes
    ]
    return f"cluster: {' and '.join(kinds)}"


def report(plan: JobPlan, best: Mapping, placed: bool) -> Iterator[Block]:
    """`placed`: the config has a placement of its own, to compare it with."""
    cluster = plan.cluster
    idle = cluster.devices - best.devices
    rest = f", {idle} idle" if idle else ""
    yield Line(f"a step takes {seconds(best.seconds)} on {best.devices} devices{rest}", "bold")
    for verb, time in zip(STAGES, best.stages, strict=True):
        if time:
            share = 100 * time / best.seconds
            yield Line(
                f"  {STAGE_NAMES[verb]:<12}{seconds(time):>9}  {share:3.0f}%  {_slowest(best, verb)}"
            )
    yield Line()
    columns = (
        "pool",
        "role",
        "devices",
        "layout",
        "engine",
        *(STAGE_NAMES[verb] for verb in STAGES),
    )
    yield Table(columns, tuple(row for pool in best.pools for row in _pool_rows(pool, cluster)))
    yield Line()
    columns = (
        "GB per device",
        "at rest",
        "generation",
        "inference",
        "training",
        "usable",
        "tightest",
    )
    yield Table(columns, tuple(_memory_row(pool, cluster) for pool in best.pools))
    yield Line()
    for other in best.others:
        more = f"{seconds(other.seconds)} ({_more(other, best)}): {_why(other, best)}"
        yield Line(f"next: {describe(other)}: {more}")
    yield Line(
        f"as the config says it: {_written(plan, best) if placed else 'the same (placement = auto)'}"
    )
    for remark in (
        *plan.work.remarks,
        *_kinds_to_choose(best, cluster),
        *_otherwise_measured(plan.work, cluster),
    ):
        yield Line(f"note: {remark}", "yellow")


def _written(plan: JobPlan, best: Mapping) -> str:
    """What the config's own placement takes, or why that is not known."""
    try:
        written = plan.written()
    except Misfit as error:
        return f"does not fit: {error}"
    except NotPlanned as error:
        return f"not known: {error}"
    return f"{seconds(written.seconds)} ({_more(written, best)}): {_why(written, best)}"


def bars(mapping: Mapping) -> Iterator[Bar]:
    """A bar per role and stage; a pool's models work one after the other."""
    begins = (0.0, mapping.stages[0], mapping.stages[0] + mapping.stages[1])
    for pool in mapping.pools:
        label = f"{'+'.join(pool.names)}\non {pool.entry.devices}"
        for verb, begin in zip(STAGES, begins, strict=True):
            at = begin
            for choice in pool.entry.choices:
                own = choice.time(verb)
                yield Bar(label, choice.option.model.name, at, own)
                at += own


def scaling(plan: JobPlan, sizes: Sequence[int]) -> Table:
    """The best mapping on other numbers of devices."""
    rows: list[tuple[str, ...]] = []
    first: tuple[int, float] | None = None
    for size in sizes:
        try:
            best = plan.best(cluster=plan.cluster.sized(size))
        except NothingFitsError as error:
            rows.append((str(size), "does not fit", "", "", "", "", error.problems[0]))
            continue
        rate = 1.0 / best.seconds
        first = first or (size, rate)
        efficiency = rate / first[1] * first[0] / size
        stages = [seconds(t) if t else "" for t in best.stages]
        rows.append(
            (str(size), seconds(best.seconds), *stages, f"{100 * efficiency:.0f}%", describe(best))
        )
    columns = (
        "devices",
        "step",
        *(STAGE_NAMES[verb] for verb in STAGES),
        "efficiency",
        "placement",
    )
    return Table(columns, tuple(rows))


def _kinds_to_choose(best: Mapping, cluster: Cluster) -> list[str]:
    """What the config has no word for."""
    if len({pool.kind for pool in best.pools}) < 2:
        return []
    on = ", ".join(
        f"{'+'.join(pool.names)} on {cluster.nodes[pool.kind].device.name}" for pool in best.pools
    )
    return [
        f"a config does not say which kind of device a pool gets, and the runtime takes any that are free: see that it is {on}"
    ]


def _otherwise_measured(work: Plannable, cluster: Cluster) -> list[str]:
    """Models whose backend, engine or precision is not the one that a device was measured with."""
    found = []
    for nodes in cluster.nodes:
        for model, own in work.runs_on.items():
            measured = nodes.measured or own
            pairs = [(own.backend, measured.backend), (own.engine, measured.engine)]
            pairs += (
                [(f"{own.bits}-bit numbers", f"{measured.bits}-bit numbers")]
                if measured.bits
                else []
            )
            found += [
                f"{model} runs on {mine}, and {nodes.device.name} was measured with {theirs}: calibrate with {mine}"
                for mine, theirs in pairs
                if mine and mine != theirs
            ]
    return found


def _more(other: Mapping, best: Mapping) -> str:
    share = 100 * (other.seconds / best.seconds - 1)
    return "the same" if abs(share) < 0.05 else f"{share:+.1f}%"


def _why(other: Mapping, best: Mapping) -> str:
    """Stage by stage, what differs."""
    parts = [
        f"{STAGE_NAMES[v]} {seconds(mine)} instead of {seconds(ours)}"
        for v, mine, ours in zip(STAGES, other.stages, best.stages, strict=True)
        if abs(mine - ours) > 0.005 * best.seconds
    ]
    return ", ".join(parts) or "no stage differs by half a percent of the step"


def _slowest(mapping: Mapping, verb: str) -> str:
    """Which pool a stage waits for, and for what."""
    stage = STAGES.index(verb)
    pool = max(mapping.pools, key=lambda p: p.entry.times[stage])
    times = {c.option.model.name: c.time(verb) for c in pool.entry.choices}
    parts = [f"{name} {seconds(t)}" for name, t in sorted(times.items(), key=lambda x: -x[1]) if t]
    wait = f"; {', '.join('+'.join(p.names) for p in mapping.pools if p is not pool and p.entry.times[stage])} waits"
    return ", then ".join(parts) + (
        wait if any(p is not pool and p.entry.times[stage] for p in mapping.pools) else ""
    )


def _pool_rows(pool: Pool, cluster: Cluster) -> list[tuple[str, ...]]:
    rows = []
    for at, choice in enumerate(pool.entry.choices):
        layout, engine = choice.option.layout, ""
        if choice.engines is not None:
            across, within = choice.engines.pp, choice.engines.tp
            engine = f"{pool.entry.devices // (across * within)} of pp {across} tp {within}"
        times = [choice.time(verb) for verb in STAGES]
        cells = [seconds(t) if t else "" for t in times]
        if choice.transition:
            cells[0] += f" ({seconds(choice.transition)} of it weights)"
        device = f"{pool.entry.devices} {cluster.nodes[pool.kind].device.name}"
        rows.append((pool.names[0] if not at else "", choice.option.model.name, device if not at else "",
                     f"pp {layout.pp} tp {layout.tp} dp {layout.dp}", engine, *cells))  # fmt: skip
    return rows


def _memory_row(pool: Pool, cluster: Cluster) -> tuple[str, ...]:
    nodes = cluster.nodes[pool.kind]
    taken = {c.option.model.name: c.option.bytes for c in pool.entry.choices}
    resident = sum(b.resident for b in taken.values())
    engines = [c for c in pool.entry.choices if c.engines is not None]
    kept = sum(c.option.model.kept(nodes.device.memory_gb) for c in engines)
    generation = max((resident + c.weights_bytes + c.cache_bytes for c in engines), default=0.0)
    most = {
        "inference": max(b.inference for b in taken.values()),
        "training": max(b.training for b in taken.values()),
    }
    phases = {name: resident + kept + more if more else 0.0 for name, more in most.items()}
    tightest = max(taken, key=lambda n: max(taken[n].training, taken[n].inference))
    phase = "trains" if taken[tightest].training >= taken[tightest].inference else "reads"
    cells = [f"{size / GB:.1f}" if size else "" for size in (generation, *phases.values())]
    if engines:
        cells[0] += f" ({max(c.cache_bytes for c in engines) / GB:.1f} of it cache)"
    share = f"{100 * max(phases.values()) / nodes.memory:.0f}% while {tightest} {phase}"
    kept_too = f", {kept / GB:.1f} of it the engine's" if kept else ""
    return (
        "+".join(pool.names),
        f"{resident / GB:.1f}",
        *cells,
        f"{nodes.memory / GB:.1f}",
        share + kept_too,
    )
