"""`hybridflow plan`: where everything goes, how long a step takes and whether it fits, before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from hybridflow.core.commands.printing import make_console, print_line, print_table
from hybridflow.core.config import read_config
from hybridflow.core.errors import ConfigError
from hybridflow.core.job import Job, resolve_jobs
from hybridflow.core.job.schema import SHORTHAND
from hybridflow.core.job.stages import shadowed_overrides
from hybridflow.core.mapping.cluster import GB, Cluster, read_cluster
from hybridflow.core.mapping.job import Misfit, NotPlanned, Plannable, as_written, check_ranks, plannable, settings
from hybridflow.core.mapping.placement import whole, without_places
from hybridflow.core.mapping.pools import seconds
from hybridflow.core.mapping.search import Mapping, NothingFitsError, Pool, describe, plan_mapping
from hybridflow.core.mapping.workload import STAGE_NAMES, STAGES


def read_sizes(text: str | None) -> list[int]:
    """ "devices=64,128" as numbers. Raises ConfigError."""
    if text is None:
        return []
    key, _, rest = text.partition("=")
    sizes = rest.split(",")
    if key != "devices" or not all(size.isdigit() and int(size) for size in sizes):
        raise ConfigError(f"--what-if {text!r}: write devices=64,128,256")
    return [int(size) for size in sizes]


def plan(
    path: str | Path, overrides: Sequence[str] = (), cluster: str | None = None, write: str | None = None,
    what_if: Sequence[int] = (), timeline: str | None = None, console: Console | None = None,
) -> None:  # fmt: skip
    """Print the best mapping of each stage of a config. Raises ConfigError, NothingFitsError among them; starts nothing."""
    console = console or make_console()
    if what_if and (write or timeline):
        raise ConfigError("--what-if tables many plans; leave out --write and --timeline, which are of one")
    if write and overrides:
        raise ConfigError("--write keeps the file's own settings: put the overrides into it first, or leave them out")
    tables, provenance = read_config(path, overrides, SHORTHAND)
    every, auto = without_places(tables, SHORTHAND)
    if problems := shadowed_overrides(tables, provenance):
        raise ConfigError(problems)
    jobs = resolve_jobs(whole(every), Path(path).stem, SHORTHAND, elsewhere=True, unplaced=auto)
    clusters = {job.stage: cluster or job.placement.cluster for job in jobs}
    if None in clusters.values():
        raise ConfigError(
            "which cluster? Give --cluster, or placement.cluster in the config: a TOML file (docs/mapping.md), or a known "
            "device, nodes and devices of each, as in a100-80gb:2x8"
        )
    found: dict[str | None, Mapping] = {}
    settled: dict[str | None, dict] = {}
    said = None
    for job in jobs:
        there = read_cluster(str(clusters[job.stage]))
        if said != clusters[job.stage]:
            print_line(console, kinds_of(there))
            said = clusters[job.stage]
        print_line(console)
        if job.stage:
            print_line(console, f"stage {job.stage}", "bold underline")
        work = plannable(job)
        check_ranks(job, there)
        if what_if:
            scaling(console, there, work, what_if)
            continue
        found[job.stage] = report(console, job, work, there, given=job.stage not in auto)
        settled[job.stage] = settings(found[job.stage], there)
    if write is not None and found:
        from hybridflow.core.commands.written import write_config

        kept = write_config(path, write, settled, cluster)
        print_line(console)
        print_line(console, f"written: {write}{'' if kept else ' (its comments could not be kept)'}")
    if timeline is not None and found:
        from hybridflow.core.commands.pictures import draw_steps

        draw_steps(timeline, list(found.items()))
        print_line(console, f"drawn: {timeline}")


def kinds_of(cluster: Cluster) -> str:
    kinds = [
        f"{n.count} x {n.per_node} {n.device.name} ({n.memory / GB:.1f} of {n.device.memory_gb:g} GB usable, "
        f"{n.figures} figures)"
        for n in cluster.nodes
    ]
    return f"cluster: {' and '.join(kinds)}"


def report(console: Console, job: Job, work: Plannable, cluster: Cluster, given: bool) -> Mapping:
    """Print one stage's plan; `given`: the config has a placement of its own, to compare it with."""
    best = plan_mapping(cluster, work.workload, work.models)
    idle = cluster.devices - best.devices
    rest = f", {idle} idle" if idle else ""
    print_line(console, f"a step takes {seconds(best.seconds)} on {best.devices} devices{rest}", "bold")
    for verb, time in zip(STAGES, best.stages, strict=True):
        if time:
            print_line(
                console,
                f"  {STAGE_NAMES[verb]:<12}{seconds(time):>9}  {100 * time / best.seconds:3.0f}%  {_slowest(best, verb)}",
            )
    print_line(console)
    print_table(
        console,
        ("pool", "role", "devices", "layout", "engine", *(STAGE_NAMES[v] for v in STAGES)),
        [row for pool in best.pools for row in _pool_rows(pool, cluster)],
    )
    print_line(console)
    print_table(
        console, ("GB per device", "at rest", "generation", "inference", "training", "usable", "tightest"),
        [_memory_row(pool, cluster) for pool in best.pools],
    )  # fmt: skip
    print_line(console)
    for other in best.others:
        print_line(
            console, f"next: {describe(other)}: {seconds(other.seconds)} ({_more(other, best)}): {_why(other, best)}"
        )
    written = as_written(job, work, cluster) if given else None
    if written is None:
        print_line(console, "as the config says it: the same (placement = auto)")
    elif isinstance(written, Misfit):
        print_line(console, f"as the config says it: does not fit: {written.why}")
    elif isinstance(written, NotPlanned):
        print_line(console, f"as the config says it: not known: {written.why}")
    else:
        print_line(
            console,
            f"as the config says it: {seconds(written.seconds)} ({_more(written, best)}): {_why(written, best)}",
        )
    for remark in (*work.remarks, *_kinds_to_choose(best, cluster), *_otherwise_measured(work, cluster)):
        print_line(console, f"note: {remark}", "yellow")
    return best


def _kinds_to_choose(best: Mapping, cluster: Cluster) -> list[str]:
    """What the config has no word for."""
    if len({pool.kind for pool in best.pools}) < 2:
        return []
    on = ", ".join(f"{'+'.join(pool.names)} on {cluster.nodes[pool.kind].device.name}" for pool in best.pools)
    return [
        f"a config does not say which kind of device a pool gets, and Ray takes any that are free: see that it is {on}"
    ]


def _otherwise_measured(work: Plannable, cluster: Cluster) -> list[str]:
    """Models whose backend, engine or precision is not the one that a device was measured with."""
    found = []
    for nodes in cluster.nodes:
        for model, own in work.runs_on.items():
            measured = nodes.measured or own
            pairs = [(own.backend, measured.backend), (own.engine, measured.engine)]
            pairs += [(f"{own.bits}-bit numbers", f"{measured.bits}-bit numbers")] if measured.bits else []
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
    stage = STAGES.index(verb)  # type: ignore[arg-type]
    pool = max(mapping.pools, key=lambda p: p.entry.times[stage])
    times = {c.option.model.name: c.time(verb) for c in pool.entry.choices}
    parts = [f"{name} {seconds(t)}" for name, t in sorted(times.items(), key=lambda x: -x[1]) if t]
    wait = f"; {', '.join('+'.join(p.names) for p in mapping.pools if p is not pool and p.entry.times[stage])} waits"
    return ", then ".join(parts) + (wait if any(p is not pool and p.entry.times[stage] for p in mapping.pools) else "")


def _pool_rows(pool: Pool, cluster: Cluster) -> list[tuple[str, ...]]:
    rows = []
    for at, choice in enumerate(pool.entry.choices):
        pp, tp, dp = choice.option.layout
        engine = ""
        if choice.rollout is not None:
            across, within = choice.rollout
            engine = f"{pool.entry.devices // (across * within)} of pp {across} tp {within}"
        times = [choice.time(verb) for verb in STAGES]
        cells = [seconds(t) if t else "" for t in times]
        if choice.transition:
            cells[0] += f" ({seconds(choice.transition)} of it weights)"
        device = f"{pool.entry.devices} {cluster.nodes[pool.kind].device.name}"
        rows.append((pool.names[0] if not at else "", choice.option.model.name, device if not at else "",
                     f"pp {pp} tp {tp} dp {dp}", engine, *cells))  # fmt: skip
    return rows


def _memory_row(pool: Pool, cluster: Cluster) -> tuple[str, ...]:
    nodes = cluster.nodes[pool.kind]
    taken = {c.option.model.name: c.option.bytes for c in pool.entry.choices}
    resident = sum(b.resident for b in taken.values())
    engines = [c for c in pool.entry.choices if c.rollout is not None]
    kept = sum(c.option.model.kept(nodes.device.memory_gb) for c in engines)
    generation = max((resident + c.weights_bytes + c.cache_bytes for c in engines), default=0.0)
    most = {name: max(getattr(b, name) for b in taken.values()) for name in ("inference", "training")}
    phases = {name: resident + kept + more if more else 0.0 for name, more in most.items()}
    tightest = max(taken, key=lambda n: max(taken[n].training, taken[n].inference))
    phase = "trains" if taken[tightest].training >= taken[tightest].inference else "reads"
    cells = [f"{size / GB:.1f}" if size else "" for size in (generation, *phases.values())]
    if engines:
        cells[0] += f" ({max(c.cache_bytes for c in engines) / GB:.1f} of it cache)"
    share = f"{100 * max(phases.values()) / nodes.memory:.0f}% while {tightest} {phase}"
    kept_too = f", {kept / GB:.1f} of it the engine's" if kept else ""
    return ("+".join(pool.names), f"{resident / GB:.1f}", *cells, f"{nodes.memory / GB:.1f}", share + kept_too)


def scaling(console: Console, cluster: Cluster, work: Plannable, sizes: Sequence[int]) -> None:
    """Print the best mapping on other numbers of devices."""
    rows: list[tuple[str, ...]] = []
    first: tuple[int, float] | None = None
    for size in sizes:
        try:
            best = plan_mapping(cluster.sized(size), work.workload, work.models, alternatives=0)
        except NothingFitsError as error:
            rows.append((str(size), "does not fit", "", "", "", "", error.problems[0]))
            continue
        rate = 1.0 / best.seconds
        first = first or (size, rate)
        efficiency = rate / first[1] * first[0] / size
        stages = [seconds(t) if t else "" for t in best.stages]
        rows.append((str(size), seconds(best.seconds), *stages, f"{100 * efficiency:.0f}%", describe(best)))
    print_table(console, ("devices", "step", *(STAGE_NAMES[v] for v in STAGES), "efficiency", "placement"), rows)
