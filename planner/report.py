"""A plan in words: the mapping, its bottlenecks, the next best mappings, and the step as bars."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from hybridflow.core.contracts.planner import (
    STAGE_NAMES,
    STAGES,
    Bar,
    Block,
    Line,
    NotPlanned,
    TextTable,
)
from hybridflow.core.values.units import seconds
from hybridflow.planner.cluster import GB, Cluster
from hybridflow.planner.jobs import JobPlan, Misfit, Plannable
from hybridflow.planner.limits import generated, limits, utilisation
from hybridflow.planner.pools import LayoutChoice
from hybridflow.planner.search import Mapping, NothingFitsError, PlannedPool, describe
from hybridflow.planner.switches import Key, Switches, Trial

STAGE_COLUMNS = tuple(STAGE_NAMES[verb] for verb in STAGES)
POOL_COLUMNS = ("pool", "role", "devices", "layout", "engine", *STAGE_COLUMNS)
MEMORY_COLUMNS = (
    "GB per device",
    "at rest",
    "generation",
    "inference",
    "training",
    "usable",
    "tightest",
)
SWITCH_COLUMNS = ("setting", "step", "change", "fullest device, GB", "placement")
LITTLE = 0.005
"""Changes below this share of the step get no row."""
SCALING_COLUMNS = ("devices", "step", *STAGE_COLUMNS, "efficiency", "placement")


def kinds_of(cluster: Cluster) -> str:
    """Return the cluster in a line: its nodes, their memory, and where the figures are from."""
    kinds = [
        f"{n.count} x {n.per_node} {n.device.name} ({n.memory / GB:.1f} of {n.device.memory_gb:g} "
        f"GB usable, {n.figures} figures)"
        for n in cluster.nodes
    ]
    return f"cluster: {' and '.join(kinds)}"


def unfit(problems: Sequence[str], switches: Switches, trial: Trial) -> Iterator[Block]:
    """Yield the reasons why a job fits nowhere as written, and the settings with which it does."""
    if not problems:
        return
    for problem in problems:
        yield Line(f"as it is written it fits nowhere: {problem}", "yellow")
    yield Line("it fits with these settings; without any one it does not, or is a quarter slower:")
    for line in switches.lines(trial.changes):
        yield Line(f"  {line}", "bold")
    yield Line()


def worth(switches: Switches, start: Trial) -> Iterator[Block]:
    """Yield the time that each setting costs or saves, and that of the faster ones together.

    A setting with several other values is shown with the fastest.
    """
    found: dict[Key, list[Trial]] = {}
    for key, trial in switches.one_by_one(start):
        found.setdefault(key, []).append(trial)

    # Settings that change the step, then those that do not.
    rows = []
    same = []
    helps: tuple[float, str] | None = None
    for key, trials in found.items():
        fastest = min(trials, key=lambda one: one.seconds)
        what = switches.line(key, fastest.values[key])
        if fastest.mapping is None:
            rows.append((what, "does not fit", "", "", ""))
        elif abs(fastest.seconds / start.seconds - 1.0) < LITTLE:
            same.append(what)
        else:
            rows.append((what, *_costs(fastest, start)))
            if fastest.seconds < min(start.seconds, helps[0] if helps else start.seconds):
                helps = (fastest.seconds, what)
    if rows:
        yield TextTable(SWITCH_COLUMNS, tuple(rows))
    if same:
        yield Line(f"less than {100 * LITTLE:g}% of the step: {', '.join(same)}")

    if helps is not None:
        saved = 100 * (1 - helps[0] / start.seconds)
        yield Line(f"the one setting that helps most: {helps[1]} (-{saved:.1f}%)", "bold")

    # The changes that save time, together.
    best = switches.fastest(start)
    if best is not start:
        changed = {key: value for key, value in best.values.items() if value != start.values[key]}
        lines = ", ".join(switches.lines(changed))
        step, change, *_ = _costs(best, start)
        yield Line(f"the fastest together: {lines}: {step} ({change})", "bold")
    yield Line()


def _costs(trial: Trial, start: Trial) -> tuple[str, str, str, str]:
    """Return a trial's seconds, their change, the GB of its fullest device, and its placement."""
    assert trial.mapping is not None and start.mapping is not None
    full = max(max(phases(pool)[1:]) for pool in trial.mapping.pools)
    more = _more(trial.mapping, start.mapping)
    return seconds(trial.seconds), more, f"{full / GB:.1f}", describe(trial.mapping)


def report(
    plan: JobPlan, best: Mapping, own: str, settings: Iterable[Block] = ()
) -> Iterator[Block]:
    """Yield the explanation of a mapping, block by block.

    own: how the job as it is written compares with it; settings: blocks on settings (see `worth`),
    which come before the notes.
    """
    # The step: how long it takes, and which pool each stage waits for.
    cluster = plan.cluster
    idle = cluster.devices - best.devices
    rest = f", {idle} idle" if idle else ""
    yield Line(f"a step takes {seconds(best.seconds)} on {best.devices} devices{rest}", "bold")
    limited = limits(plan, best)
    for verb, time in zip(STAGES, best.stages, strict=True):
        if time:
            share = 100 * time / best.seconds
            head = f"  {STAGE_NAMES[verb]:<12}{seconds(time):>9}  {share:3.0f}%"
            yield Line(f"{head}  {_slowest(best, verb)}")
            yield Line(f"{'':<29}{_use(plan, best, verb)}; limited by {_limited(limited[verb])}")
    yield Line()

    # The pools: layouts and times, then memory.
    pool_rows: list[tuple[str, ...]] = []
    for pool in best.pools:
        pool_rows += _pool_rows(pool, cluster)
    yield TextTable(POOL_COLUMNS, tuple(pool_rows))
    yield Line()
    yield TextTable(MEMORY_COLUMNS, tuple(_memory_row(pool, cluster) for pool in best.pools))
    yield Line()

    # Other placements, the config's own among them.
    for other in best.others:
        more = f"{seconds(other.seconds)} ({_more(other, best)}): {_why(other, best)}"
        yield Line(f"next: {describe(other)}: {more}")
    yield Line(f"as the config says it: {own}")
    yield Line()
    yield from settings

    # Notes on the figures.
    for line in assumed(cluster):
        yield Line(line)
    notes = (
        *plan.work.remarks,
        *_room(plan, best),
        *_kinds_to_choose(best, cluster),
        *_otherwise_measured(plan.work, cluster),
    )
    for note in notes:
        yield Line(f"note: {note}", "yellow")


def _use(plan: JobPlan, mapping: Mapping, verb: str) -> str:
    """Return a stage's throughput: generated tokens per second, or model FLOPs utilisation."""
    if verb != "generate":
        return f"{100 * utilisation(plan, mapping, verb):.0f}% of the peak (MFU)"
    rate = generated(plan) / mapping.stages[0]
    return f"{rate:,.0f} tokens/s, {rate / mapping.devices:,.0f} per device"


def _limited(rows: Sequence[tuple[str, float]]) -> str:
    """Return the bottlenecks of a stage: the largest, and others with a tenth or more."""
    first, *others = rows
    named = [first, *(row for row in others if row[1] >= 0.1)]
    return ", ".join(f"{respect} ({100 * share:.0f}%)" for respect, share in named)


def assumed(cluster: Cluster) -> Iterator[str]:
    """Yield the figures of each kind of nodes that matter most, with their efficiencies."""
    for nodes in cluster.nodes:
        device = nodes.device
        e = nodes.efficiency
        wide = "" if device.fp32_tflops is None else f" ({device.fp32_tflops:g} in float32)"
        figures = [
            f"matrix products {device.tflops:g} TFLOP/s{wide} x {e.training:g} in training and "
            f"{e.inference:g} in forward passes",
            f"memory {device.bandwidth_gbs:g} GB/s x {e.memory:g} in decoding",
            f"links {device.link_gbs:g} GB/s x {e.link:g}",
        ]
        if nodes.count > 1:
            network = f"network {8 * nodes.between_gbs:g} Gbit/s per node x {e.network:g}"
            figures.append(f"{network} (another: DEVICE:[NODESx]DEVICES@GBIT/S)")
        figures.append(f"memory for models {device.memory_gb:g} GB x {e.usable:g}")
        figures.append(f"{e.sequence_us:g} us per sequence and decoding step")
        yield f"assumed of {device.name}: {', '.join(figures)}"


def written(plan: JobPlan, best: Mapping) -> str:
    """Return the step's seconds with the config's own placement, or why they are not known."""
    # A config without pools has one device, which is rarely intended.
    asked = sum(pool.world for pool in plan.job.pools.values() if pool.device is None)
    if asked == 1 < plan.cluster.devices:
        return "not compared, as its pools have one device"
    try:
        own = plan.written()
    except Misfit as error:
        return f"does not fit: {error}"
    except NotPlanned as error:
        return f"not known: {error}"
    return f"{seconds(own.seconds)} ({_more(own, best)}): {_why(own, best)}"


def bars(mapping: Mapping) -> Iterator[Bar]:
    """Yield a bar for each role and step stage; a pool's models work one after the other."""
    generation, inference, _ = mapping.stages
    begins = (0.0, generation, generation + inference)
    for pool in mapping.pools:
        label = f"{'+'.join(pool.names)}\non {pool.entry.devices}"
        for verb, begin in zip(STAGES, begins, strict=True):
            started = begin
            # In the order in which the pool's models work.
            for choice in pool.entry.choices:
                own = choice.time(verb)
                yield Bar(label, choice.option.model.name, started, own)
                started += own


def scaling(plan: JobPlan, sizes: Sequence[int]) -> TextTable:
    """Return the best mapping on other numbers of devices.

    Efficiency is the steps per second and device, as a share of those of the first size that fits.
    """
    rows: list[tuple[str, ...]] = []
    first: tuple[int, float] | None = None
    for size in sizes:
        try:
            best = plan.best(cluster=plan.cluster.sized(size))
        except NothingFitsError as error:
            empty = [""] * (len(SCALING_COLUMNS) - 3)
            rows.append((str(size), "does not fit", *empty, error.problems[0]))
            continue

        # Steps per second and device, beside those of the first size.
        rate = 1.0 / best.seconds
        first = first or (size, rate)
        first_size, first_rate = first
        efficiency = rate / first_rate * first_size / size
        times = [seconds(time) if time else "" for time in best.stages]
        percent = f"{100 * efficiency:.0f}%"
        step = seconds(best.seconds)
        rows.append((str(size), step, *times, percent, describe(best)))
    return TextTable(SCALING_COLUMNS, tuple(rows))


def _room(plan: JobPlan, best: Mapping) -> Iterator[str]:
    """Yield notes on engines that decode fewer sequences at once than memory has room for."""
    work = plan.work.workload
    for pool in best.pools:
        nodes = plan.cluster.nodes[pool.kind]
        for choice in pool.entry.choices:
            if choice.engines is None:
                continue
            model = choice.option.model
            limits = model.limits
            shards = choice.engines.pp * choice.engines.tp
            asked = max(task.sequences for task in work.of(model.name, "generate"))
            each = -(-asked // (pool.entry.devices // shards))
            if each <= limits.max_sequences:
                continue

            # The size of the cache, and the unused memory beside it.
            cut = min(choice.engines.tp, model.shape.kv_heads) * choice.engines.pp
            sequence = model.cache_bytes * work.tokens / cut
            generation, inference, training = phases(pool)
            held = max(generation, inference, training) if model.keeps_engine else generation
            idle = nodes.memory - held
            fit = int(choice.cache_bytes // sequence)
            if fit > limits.max_sequences:
                yield (
                    f"{model.name}: an engine gets {each} sequences and decodes "
                    f"{limits.max_sequences} at once, where its cache has room for {fit} "
                    "(rollout.max_sequences)"
                )
            if idle > sequence:
                yield (
                    f"{model.name}: {idle / GB:.1f} GB of each device are idle while it generates, "
                    f"room for {int(idle // sequence)} more sequences at once"
                )


def _kinds_to_choose(best: Mapping, cluster: Cluster) -> list[str]:
    """Return a note for pools on several kinds of devices, which a config cannot ask for."""
    # On one kind of device there is nothing to choose.
    if len({pool.kind for pool in best.pools}) < 2:
        return []
    on = ", ".join(
        f"{'+'.join(pool.names)} on {cluster.nodes[pool.kind].device.name}" for pool in best.pools
    )
    return [
        "a config does not say which kind of device a pool gets, and the runtime takes any that "
        f"are free: see that it is {on}"
    ]


def _otherwise_measured(work: Plannable, cluster: Cluster) -> list[str]:
    """Return notes on models with a backend, engine or precision that was not measured."""
    notes = []
    for nodes in cluster.nodes:
        for model, own in work.runs_on.items():
            # Figures that were not measured are not tied to a software.
            measured = nodes.measured or own
            pairs = [(own.backend, measured.backend), (own.engine, measured.engine)]
            if measured.bits:
                pairs.append((f"{own.bits}-bit numbers", f"{measured.bits}-bit numbers"))
            for wanted, calibrated in pairs:
                if wanted and wanted != calibrated:
                    notes.append(
                        f"{model} runs on {wanted}, and {nodes.device.name} was measured with "
                        f"{calibrated}: calibrate with {wanted}"
                    )
    return notes


def _more(other: Mapping, best: Mapping) -> str:
    """Return how much longer the step takes than the best: "+12.3%"."""
    share = 100 * (other.seconds / best.seconds - 1)
    return "the same" if abs(share) < 0.05 else f"{share:+.1f}%"


def _why(other: Mapping, best: Mapping) -> str:
    """Return the step stages that differ by half a percent of the best step or more."""
    parts = [
        f"{STAGE_NAMES[verb]} {seconds(theirs)} instead of {seconds(ours)}"
        for verb, theirs, ours in zip(STAGES, other.stages, best.stages, strict=True)
        if abs(theirs - ours) > 0.005 * best.seconds
    ]
    return ", ".join(parts) or "no stage differs by half a percent of the step"


def _slowest(mapping: Mapping, verb: str) -> str:
    """Return a step stage's slowest pool, with its models' times, and the pools that wait."""
    stage = STAGES.index(verb)
    slowest = max(mapping.pools, key=lambda p: p.entry.times[stage])
    times = {c.option.model.name: c.time(verb) for c in slowest.entry.choices}
    longest_first = sorted(times.items(), key=lambda item: -item[1])
    text = ", then ".join(f"{name} {seconds(time)}" for name, time in longest_first if time)

    # The other pools with work in this stage end before it does.
    waiting = [
        "+".join(pool.names)
        for pool in mapping.pools
        if pool is not slowest and pool.entry.times[stage]
    ]
    return f"{text}; {', '.join(waiting)} waits" if waiting else text


def _pool_rows(pool: PlannedPool, cluster: Cluster) -> list[tuple[str, ...]]:
    """Return a row per model; the pool's name and devices stand in the first one alone."""
    devices = f"{pool.entry.devices} {cluster.nodes[pool.kind].device.name}"
    rows = []
    for i, choice in enumerate(pool.entry.choices):
        model = choice.option.model
        layout = choice.option.layout
        # An empty cell: the model has no work in this stage.
        cells = [seconds(time) if time else "" for time in map(choice.time, STAGES)]
        if choice.transition:
            cells[0] += f" ({seconds(choice.transition)} of it weights)"
        row = (
            "" if i else pool.names[0],
            model.name,
            "" if i else devices,
            f"pp {layout.pp} tp {layout.tp} dp {layout.dp}",
            _engine(choice, pool.entry.devices),
            *cells,
        )
        rows.append(row)
    return rows


def _engine(choice: LayoutChoice, devices: int) -> str:
    """Return the number of engines and their sizes ("4 of pp 1 tp 2"), or "" without an engine."""
    if choice.engines is None:
        return ""
    pp = choice.engines.pp
    tp = choice.engines.tp
    return f"{devices // (pp * tp)} of pp {pp} tp {tp}"


def _kept(pool: PlannedPool) -> float:
    """Return the bytes of a device that engines keep while models infer and train."""
    return sum(
        choice.weights_bytes + choice.cache_bytes + 1e9 * choice.option.model.limits.graphs_gb
        for choice in pool.entry.choices
        if choice.option.model.keeps_engine
    )


def phases(pool: PlannedPool) -> tuple[float, float, float]:
    """Return the bytes of a pool's devices in generation, inference and training.

    They are 0 for a stage without work.
    """
    sizes = [c.option.bytes for c in pool.entry.choices]
    resident = sum(size.resident for size in sizes)

    # While it generates, an engine has its weights, its cache, and working memory.
    engines = [choice for choice in pool.entry.choices if choice.engines is not None]
    kept = _kept(pool)
    generation = max((resident + choice.generating for choice in engines), default=0.0)

    # One model reads or trains at a time, so the largest counts.
    most_read = max(size.inference for size in sizes)
    most_trained = max(size.training for size in sizes)
    inference = resident + kept + most_read if most_read else 0.0
    training = resident + kept + most_trained if most_trained else 0.0
    return generation, inference, training


def _memory_row(pool: PlannedPool, cluster: Cluster) -> tuple[str, ...]:
    """Return the memory of a pool's devices, at rest and in each step stage."""
    nodes = cluster.nodes[pool.kind]
    sizes = {c.option.model.name: c.option.bytes for c in pool.entry.choices}
    resident = sum(size.resident for size in sizes.values())
    engines = [choice for choice in pool.entry.choices if choice.engines is not None]
    kept = _kept(pool)
    generation, inference, training = phases(pool)

    # The model whose phase needs the most.
    most = {role: max(size.training, size.inference) for role, size in sizes.items()}
    name = max(most, key=lambda role: most[role])
    phase = "trains" if sizes[name].training >= sizes[name].inference else "reads"

    # An empty cell: nothing happens in this stage.
    cells = [f"{size / GB:.1f}" if size else "" for size in (generation, inference, training)]
    if engines:
        cells[0] += f" ({max(choice.cache_bytes for choice in engines) / GB:.1f} of it cache)"
    tightest = f"{100 * max(inference, training) / nodes.memory:.0f}% while {name} {phase}"
    if kept:
        tightest += f", {kept / GB:.1f} of it the engine's"
    usable = f"{nodes.memory / GB:.1f}"
    return ("+".join(pool.names), f"{resident / GB:.1f}", *cells, usable, tightest)
