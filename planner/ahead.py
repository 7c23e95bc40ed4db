"""How much faster a step is with run.max_staleness, and on which devices its engines should be.

A step whose steps overlap does not end with its slowest stage: what counts is who waits for whom
(overlap.py), and how long the longest responses are beside the others. So response lengths are
those of an earlier run (placement.lengths), or drawn from a lognormal distribution.

Devices are split into those of the engines and the others, which train and score as in the best
placement of the rest of the step. Beside the splits stands the best placement of all models with
engines that take turns with the training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import numpy as np

from hybridflow.core.contracts.planner import Block, Line, TextTable
from hybridflow.core.errors import ConfigError, HybridFlowError
from hybridflow.core.values.parallel import GenerationLayout
from hybridflow.core.values.units import seconds
from hybridflow.kit.recording import SAMPLES, read_rows
from hybridflow.planner.jobs import JobPlan
from hybridflow.planner.overlap import Engines, Timing, simulate
from hybridflow.planner.pools import PoolPlanner, after, rollouts
from hybridflow.planner.search import Mapping, describe, slowest
from hybridflow.planner.workload import PlannedModel, Workload

STALENESS = (0, 1, 2, 4)
"""The values of run.max_staleness that are compared."""
SIGMA, MEAN_SHARE = 1.0, 0.25
"""Of the lognormal distribution that stands for lengths which are not known: its spread, and its
mean as a share of sampling.max_tokens."""
MOST_SPLITS = 4
"""Splits of the devices that are simulated, the best by a lower bound."""
GAIN = 0.03
"""A larger bound is recommended where a step is faster by this share for each further step."""


@attrs.frozen(eq=False)
class Way:
    """Devices for engines and for training, and a step's times with each bound."""

    where: str
    apart: bool
    """Whether engines have a pool of their own."""
    engines: Engines
    training_s: float
    """Seconds of scoring and training."""
    sync_s: float
    timings: dict[int, Timing] = attrs.field(factory=dict)
    """run.max_staleness -> times of a step."""

    def time(self, lengths: Callable[[int], np.ndarray], prompt: int) -> None:
        """Simulate the steps of each bound."""
        for staleness in STALENESS:
            self.timings[staleness] = simulate(
                self.engines,
                lengths,
                self.training_s,
                self.sync_s,
                staleness,
                self.apart,
                self.apart and staleness == 1,
                prompt,
            )


@attrs.frozen
class Lengths:
    """Lengths of responses: those of a run, or assumed ones."""

    known: np.ndarray
    """Tokens of each, int64."""
    said: str
    """Where they are from."""

    @property
    def mean(self) -> float:
        """The mean number of tokens of a response."""
        return float(self.known.mean())

    def of(self, rows: int) -> Callable[[int], np.ndarray]:
        """Return a function that draws those of a step with so many rows, by the step's number."""
        return lambda step: np.random.default_rng(step).choice(self.known, rows)


def lengths_of(folder: str | None, most: int) -> Lengths:
    """Return response lengths of a run; without one those that are assumed, of at most `most`.

    Raises ConfigError where the run has no recorded samples.
    """
    if folder is None:
        mean = MEAN_SHARE * most
        draws = np.random.default_rng(0).lognormal(np.log(mean) - SIGMA**2 / 2, SIGMA, 4096)
        known = np.clip(draws, 1, most).astype(np.int64)
        said = (
            f"lognormal lengths, {known.mean():,.0f} tokens on average (assumed; "
            "placement.lengths = RUN takes those of a run)"
        )
        return Lengths(known, said)
    rows = read_rows(Path(folder), SAMPLES, ["data", "tokens"])
    found = [row["tokens"] for row in rows if row["data"] == "train" and row.get("tokens")]
    if not found:
        raise ConfigError(
            f"placement.lengths: {folder!r} has no recorded samples of training; name the folder "
            "of a run with run.samples > 0, or leave the setting out"
        )
    known = np.array(found, np.int64)
    return Lengths(known, f"lengths of {folder}, {known.mean():,.0f} tokens on average")


def ahead(plan: JobPlan, best: Mapping) -> Iterator[Block]:
    """Yield the times of a step with each bound and split of the devices, and the fastest."""
    try:
        role, rows = _generating(plan)
        lengths = lengths_of(plan.job.placement.lengths, plan.work.workload.response_tokens)
        ways = [_beside(plan, best, role, lengths), *_splits(plan, role, lengths)]
    except HybridFlowError as error:
        yield Line(f"steps that overlap are not planned: {error}", "yellow")
        yield Line()
        return
    prompt = plan.work.workload.prompt_tokens
    drawn = lengths.of(rows)
    bound = sorted(ways[1:], key=lambda way: max(way.training_s, _least(way, rows, lengths)))
    shown = [ways[0], *bound[:MOST_SPLITS]]
    for way in shown:
        way.time(drawn, prompt)

    yield Line(f"steps that overlap (run.max_staleness), {lengths.said}", "bold")
    heads = ("engines", *(f"max_staleness {staleness}" for staleness in STALENESS))
    yield TextTable(
        heads,
        tuple(
            (way.where, *(seconds(way.timings[staleness].step) for staleness in STALENESS))
            for way in shown
        ),
    )
    way, staleness = recommended(shown)
    plain = shown[0].timings[0].step
    timing = way.timings[staleness]
    yield Line(
        f"recommended: run.max_staleness = {staleness}, engines {way.where}: "
        f"{seconds(timing.step)}, {plain / timing.step:.2f} times as fast as without; engines "
        f"work {timing.engines_busy:.0%} of the time, the others {timing.trainer_busy:.0%}",
        "bold",
    )
    yield Line()


def recommended(ways: list[Way]) -> tuple[Way, int]:
    """Return the way and the bound to take: the smallest bound that no larger one beats by much.

    Tokens of older weights teach less, so that each further step of the bound must gain GAIN.
    """
    every = [(staleness, way) for way in ways for staleness in STALENESS]
    staleness, way = min(every, key=lambda one: one[1].timings[one[0]].step * (1 + GAIN) ** one[0])
    return way, staleness


def _least(way: Way, rows: int, lengths: Lengths) -> float:
    """Return a lower bound of the seconds of a step's generation."""
    engines = way.engines
    at_once = min(engines.places, -(-rows // engines.replicas))
    step = engines.step_s + engines.sequence_s * at_once
    return rows / engines.replicas / at_once * lengths.mean * step


def _generating(plan: JobPlan) -> tuple[str, int]:
    """Return the one trained model that generates, and the rows that it generates in a step."""
    tasks = [task for task in plan.work.workload.tasks if task.verb == "generate"]
    roles = {task.role for task in tasks}
    trained = {model.name for model in plan.work.models if model.trained}
    if len(roles) != 1 or not roles <= trained:
        raise HybridFlowError(
            f"{', '.join(sorted(roles)) or 'no role'} generates; it is known for one role that is "
            "trained"
        )
    if len(plan.cluster.nodes) > 1:
        raise HybridFlowError("the cluster has several kinds of devices; it is known for one")
    return roles.pop(), sum(task.sequences * task.times for task in tasks)


def _typical(work: Workload, lengths: Lengths) -> Workload:
    """Return the work with responses of the mean length."""
    return attrs.evolve(work, response_tokens=max(1, round(lengths.mean)), open_steps=1)


def _without_generation(work: Workload) -> Workload:
    kept = tuple(task for task in work.tasks if task.verb != "generate")
    return attrs.evolve(work, tasks=kept, open_steps=1)


def _training(mapping: Mapping, plan: JobPlan, work: Workload) -> float:
    """Return the seconds of scoring and training of a mapping, for this work."""
    times = []
    for pool in mapping.pools:
        planner = PoolPlanner(plan.cluster.nodes[pool.kind], work)
        options = [planner.option(c.option.model, c.option.layout) for c in pool.entry.choices]
        moved = planner.moved([option.model for option in options])
        infer, train = (
            sum(getattr(option, name) for option in options) for name in ("infer", "train")
        )
        times.append((0.0, *after(moved, infer, train)))
    return sum(slowest(times))


def _engines(
    planner: PoolPlanner, model: PlannedModel, cut: GenerationLayout, cache: float
) -> Engines:
    """Return engines of a cut, whose caches have so many bytes on each device."""
    simulator = planner.simulator
    places = int(min(max(simulator.fit(model, cut, cache), 1), model.limits.max_sequences))
    # A decoding step is nearly linear in its sequences.
    one = float(simulator.decoding_step(model, cut, 1.0))
    all_of_them = float(simulator.decoding_step(model, cut, float(places)))
    each = (all_of_them - one) / max(places - 1, 1)
    thousand = simulator.prefill(model, cut, 1000.0)
    replicas = cut.train.world // (cut.pp * cut.tp)
    return Engines(replicas, places, one - each, each, thousand / 1000.0)


def _beside(plan: JobPlan, best: Mapping, role: str, lengths: Lengths) -> Way:
    """Return the best placement, whose engines take turns with the training."""
    work = _typical(plan.work.workload, lengths)
    [(pool, choice)] = [
        (pool, choice)
        for pool in best.pools
        for choice in pool.entry.choices
        if choice.option.model.name == role
    ]
    assert choice.engines is not None
    planner = PoolPlanner(plan.cluster.nodes[pool.kind], work)
    engines = _engines(planner, choice.option.model, choice.engines, choice.cache_bytes)
    training = _training(best, plan, work)
    return Way(
        f"beside the training, {describe(best)}", False, engines, training, choice.transition
    )


def _splits(plan: JobPlan, role: str, lengths: Lengths) -> Iterator[Way]:
    """Yield the ways to give engines devices of their own."""
    [nodes] = plan.cluster.nodes
    [model] = [model for model in plan.work.models if model.name == role]
    generation = _typical(plan.work.workload, lengths)
    others = _without_generation(plan.work.workload)
    for devices in nodes.sizes():
        try:
            own = plan.cluster.sized(devices)
            rest = attrs.evolve(
                plan,
                cluster=plan.cluster.sized(plan.cluster.devices - devices),
                work=attrs.evolve(plan.work, workload=others),
            )
            mapping = rest.best()
        except ConfigError:  # these are no whole nodes, or too few for the rest
            continue
        found = _fastest(PoolPlanner(own.nodes[0], generation), model, devices)
        if found is not None:
            engines, sync = found
            training = _training(mapping, rest, _typical(others, lengths))
            where = f"on {devices}, {describe(mapping)}"
            yield Way(where, True, engines, training, sync)


def _fastest(
    planner: PoolPlanner, model: PlannedModel, devices: int
) -> tuple[Engines, float] | None:
    """Return the fastest engines on devices of their own, and the seconds of a sync to them."""
    best: tuple[float, Engines, float] | None = None
    machine = planner.simulator.machine
    alone = attrs.evolve(model, keeps_engine=False)
    for cut in rollouts(model, planner.nodes, devices):
        weights = model.size.params * model.limits.weight_bytes / (cut.pp * cut.tp)
        cache = float(planner.cache(alone, cut, 0.0, weights))
        generate = float(planner.generation(model, cut, cache))
        if generate < np.inf and (best is None or generate < best[0]):
            # Every rank of another pool receives all that its engine holds.
            sync = machine.nodes.efficiency.sync_ms * 1e-3 + weights / machine.link_rate
            if devices >= planner.nodes.per_node:
                sync += weights * planner.nodes.per_node / machine.network_rate
            best = (generate, _engines(planner, alone, cut, cache), sync)
    return None if best is None else best[1:]
