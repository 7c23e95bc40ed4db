"""Models that share devices: every choice of their layouts that may be part of a best mapping."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import attrs
import numpy as np

from hybridflow.core.values.parallel import GenerationLayout, ParallelLayout
from hybridflow.planner.cluster import GB, Nodes
from hybridflow.planner.memory import Bytes, Memory
from hybridflow.planner.times import Simulator
from hybridflow.planner.workload import PlannedModel, Workload


@attrs.frozen(eq=False)
class Option:
    """A model in a layout: seconds per step, bytes per device."""

    model: PlannedModel
    layout: ParallelLayout
    infer: float
    train: float
    bytes: Bytes

    @property
    def most(self) -> float:
        return max(self.bytes.training, self.bytes.inference)


@attrs.frozen(eq=False)
class Choice:
    """What a mapping says of a model."""

    option: Option
    engines: GenerationLayout | None = None
    """Of a model that generates: how the pool's devices are cut into engines."""
    transition: float = 0.0
    generate: float = 0.0
    weights_bytes: float = 0.0
    """Of the engine's weights on each device, beside the trained ones."""
    cache_bytes: float = 0.0
    """Free for the engine's cache on each device."""

    @property
    def seconds(self) -> float:
        """Of generation and the transition."""
        return self.transition + self.generate

    def time(self, verb: str) -> float:
        """Seconds of a stage."""
        return {"generate": self.seconds, "infer": self.option.infer, "train": self.option.train}[
            verb
        ]


@attrs.frozen
class Candidate:
    """A pool that may be part of a best mapping."""

    devices: int
    times: tuple[float, float, float]
    picks: tuple[int, ...]
    """Which of its models' options, those of models that generate last."""


@attrs.frozen(eq=False)
class Entry:
    """A pool: its models' choices on `devices` devices, and the seconds of its stages."""

    devices: int
    times: tuple[float, float, float]
    """Generation with the transition, inference, training."""
    choices: tuple[Choice, ...]


@attrs.frozen(eq=False)
class _Combinations:
    """Layouts of some models of a pool, a combination in each row."""

    times: np.ndarray
    """[n, 2]: inference, training."""
    resident: np.ndarray
    """[n]: bytes that rest on a device."""
    most: np.ndarray
    """[n]: and more while one of them works."""
    picks: np.ndarray
    """[n, models]: which of a model's options."""

    def taken(self, rows: np.ndarray) -> _Combinations:
        return _Combinations(
            self.times[rows], self.resident[rows], self.most[rows], self.picks[rows]
        )

    def front(self) -> _Combinations:
        return self.taken(front(np.column_stack([self.times, self.resident, self.most])))


def front(points: np.ndarray) -> np.ndarray:
    """Rows of `points` [n, k] that no other row is at least as good as (as small) in every column; of equals the first."""
    left = np.lexsort(points.T[::-1])
    kept = []
    while len(left):
        best = left[0]  # nothing after it in this order can be better in all columns
        kept.append(best)
        left = left[~(points[left] >= points[best]).all(1)]
    return np.array(kept, dtype=np.int64)


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


@attrs.frozen(eq=False)
class Cut:
    """A way to cut devices into engines, beside each of a model's options."""

    engines: GenerationLayout
    transitions: np.ndarray
    """Seconds of bringing the trained weights there, by option."""
    weights: np.ndarray
    """Bytes that the engine's weights take beside the trained ones, by option."""


def layouts(model: PlannedModel, nodes: Nodes, devices: int, most_dp: int) -> list[ParallelLayout]:
    """Those that use all of `devices`: tp inside a node and dividing the model, pp dividing the layers (of backends that have
    it), dp at most the sequences there are to share."""
    found = []
    for tp in divisors(min(nodes.per_node, devices)) if "tp" in model.axes else [1]:
        if devices % tp or model.shape.tensor_parallel_problems(tp):
            continue
        for pp in divisors(model.shape.layers) if "pp" in model.axes else [1]:
            if devices % (tp * pp) or devices // (tp * pp) > most_dp:
                continue
            layout = ParallelLayout(pp, tp, devices // (tp * pp))
            if model.takes(layout):
                found.append(layout)
    return found


def rollouts(model: PlannedModel, nodes: Nodes, devices: int) -> list[GenerationLayout]:
    """Engines on `devices`: tp inside a node, one stage or as many as divide the layers, in powers of two."""
    found, ranks = [], ParallelLayout(dp=devices)
    for tp in divisors(min(nodes.per_node, devices)):
        if tp > model.max_rollout_tp or model.shape.tensor_parallel_problems(tp):
            continue
        pp = 1
        while (
            devices % (pp * tp) == 0 and model.shape.layers % pp == 0 and pp <= model.max_rollout_pp
        ):
            found.append(GenerationLayout(ranks, pp, tp))
            pp *= 2
    return found


@attrs.frozen(slots=False, eq=False)
class PoolPlanner:
    """Of one kind of nodes; what it has found it keeps."""

    nodes: Nodes
    workload: Workload
    models: tuple[PlannedModel, ...]

    @cached_property
    def simulator(self) -> Simulator:
        return Simulator.of(self.nodes, self.workload)

    @cached_property
    def sizes(self) -> Memory:
        return Memory(self.simulator)

    @cached_property
    def _options(self) -> dict[tuple[str, int], list[Option]]:
        return {}

    @cached_property
    def _cuts(self) -> dict[tuple[str, int], list[Cut]]:
        return {}

    def generates(self, model: PlannedModel) -> bool:
        return bool(self.workload.of(model.name, "generate"))

    def most_dp(self, model: PlannedModel) -> int:
        shared = [
            t.sequences
            for t in self.workload.tasks
            if t.role == model.name and t.verb != "generate"
        ]
        return max(shared, default=1 << 40)

    def options(self, model: PlannedModel, devices: int) -> list[Option]:
        """Every layout that fits alone; of models that do not generate those that are not dominated."""
        at = (model.name, devices)
        if at in self._options:
            return self._options[at]
        every = (
            self.option(model, layout)
            for layout in layouts(model, self.nodes, devices, self.most_dp(model))
        )
        found = [o for o in every if o.bytes.resident + o.most <= self.nodes.memory]
        if found and not self.generates(model):
            found = [
                found[i]
                for i in front(
                    np.array([(o.infer, o.train, o.bytes.resident, o.most) for o in found])
                )
            ]
        self._options[at] = found
        return found

    def cuts(self, model: PlannedModel, devices: int) -> list[Cut]:
        """Every way to cut `devices` into engines, beside each option."""
        at = (model.name, devices)
        if at not in self._cuts:
            options = self.options(model, devices)
            self._cuts[at] = [
                Cut(
                    engines,
                    np.array([self.transition(o, engines) for o in options]),
                    np.array(
                        [self.sizes.engine_weights(model, o.layout, engines) for o in options]
                    ),
                )
                for engines in rollouts(model, self.nodes, devices)
            ]
        return self._cuts[at]

    def option(self, model: PlannedModel, layout: ParallelLayout) -> Option:
        sim, taken = self.simulator, self.sizes.bytes(model, layout)
        infer = sum(
            t.times * sim.inference(model, t.sequences, layout)
            for t in self.workload.of(model.name, "infer")
        )
        train = sum(
            t.times * sim.update(model, t.sequences, layout)
            for t in self.workload.of(model.name, "train")
        )
        moves = sim.moves(model, layout, taken.fetched)
        infer += moves * sum(t.times for t in self.workload.of(model.name, "infer"))
        train += moves * sum(t.times for t in self.workload.of(model.name, "train"))
        return Option(model, layout, infer, train, taken)

    def memory(self, members: Sequence[PlannedModel]) -> float:
        """Usable bytes of a device while these models read and train: an engine may keep its share."""
        return self.nodes.memory - sum(
            m.kept(self.nodes.device.memory_gb) for m in members if self.generates(m)
        )

    def engines_keep(self, members: Sequence[PlannedModel]) -> str:
        """For messages: what of the memory is not usable for that, and how it would be."""
        device = self.nodes.device.memory_gb
        kept = {
            m.name: m.kept(device) / GB for m in members if self.generates(m) and m.keeps_engine
        }
        if not kept:
            return ""
        ways = " or ".join(f"{name}.generation.keep = false" for name in kept)
        return f" ({sum(kept.values()):.1f} GB more are kept by engines: set {ways}, or give them less)"

    def cache(
        self, model: PlannedModel, engines: GenerationLayout, resident: Any, weights: Any
    ) -> Any:
        """Bytes of a device for the cache of an engine whose weights take `weights` bytes beside `resident` ones; numbers or
        arrays."""
        limits, device = model.limits, self.nodes.device.memory_gb * GB
        whole = model.size.params * limits.weight_bytes / (engines.pp * engines.tp)
        share = 1.0 if limits.memory_share is None else limits.memory_share
        free = np.minimum(self.nodes.memory - resident - weights, share * device - whole)
        free = free if limits.cache_gb is None else np.minimum(free, limits.cache_gb * GB)
        if limits.cache_tokens is None:
            return free
        cut = min(engines.tp, model.shape.kv_heads) * engines.pp
        return np.minimum(free, limits.cache_tokens * model.cache_bytes / cut)

    def generation(self, model: PlannedModel, engines: GenerationLayout, cache: Any) -> Any:
        """Seconds of a step's generation with so many bytes of each device for the cache: a number, or an array."""
        tasks = self.workload.of(model.name, "generate")
        return sum(
            t.times * self.simulator.generation(model, t.sequences, engines, cache) for t in tasks
        )

    def transition(self, option: Option, engines: GenerationLayout) -> float:
        if not option.model.trained:
            return 0.0
        moves = self.simulator.moves(option.model, option.layout, option.bytes.fetched)
        return self.simulator.transition(option.model, option.layout, engines) + moves

    def engine(
        self, option: Option, devices: int, resident: float, engines: GenerationLayout | None = None
    ) -> Choice | None:
        """The option with the fastest engine beside `resident` bytes of each device, or the one given; None where none
        fits."""
        best: Choice | None = None
        for cut in rollouts(option.model, self.nodes, devices) if engines is None else [engines]:
            weights = self.sizes.engine_weights(option.model, option.layout, cut)
            cache = float(self.cache(option.model, cut, resident, weights))
            generate = float(self.generation(option.model, cut, cache))
            found = Choice(option, cut, self.transition(option, cut), generate, weights, cache)
            if found.generate < np.inf and (best is None or found.seconds < best.seconds):
                best = found
        return best

    def moved(self, members: Sequence[PlannedModel]) -> float:
        """Seconds of a step's columns to a pool in which nothing generates."""
        rows = max(
            (t.sequences * t.times for t in self.workload.tasks if t.verb == "generate"), default=0
        )
        if any(self.generates(m) for m in members) or not rows:
            return 0.0
        return (
            rows
            * self.workload.tokens
            * self.workload.row_bytes
            / self.simulator.machine.network_rate
        )

    def candidates(self, members: tuple[PlannedModel, ...], devices: int) -> list[Candidate]:
        """The pools of these models on so many devices that no other is better than in all three stages."""
        nothing = np.zeros(1)
        found = _Combinations(np.zeros((1, 2)), nothing, nothing, np.zeros((1, 0), dtype=np.int64))
        order = sorted(members, key=self.generates)  # those that generate last
        for model in order:
            found = self._with(found, self.options(model, devices), self.memory(members))
            if not len(found.resident):  # no room for them together
                return []
            if not self.generates(model):
                found = found.front()
        generation = np.zeros(len(found.resident))
        for column, model in enumerate(order):
            if self.generates(model):
                generation += self._generation(model, devices, found, column)
        moved = self.moved(members)
        stages = [
            (g, *after(moved, i, t)) for g, (i, t) in zip(generation, found.times, strict=True)
        ]
        points = np.array(stages).reshape(-1, 3)
        rows = np.flatnonzero(np.isfinite(generation))
        kept = rows[front(points[rows])]
        return [
            Candidate(devices, tuple(map(float, points[row])), tuple(map(int, found.picks[row])))
            for row in kept
        ]  # type: ignore[arg-type]

    def _with(self, found: _Combinations, options: list[Option], memory: float) -> _Combinations:
        """Each combination with each option, where the memory is enough."""
        times = np.array([(o.infer, o.train) for o in options]).reshape(-1, 2)
        resident = np.array([o.bytes.resident for o in options])
        most = np.array([o.most for o in options])
        n, m = len(found.resident), len(options)
        before, added = np.repeat(np.arange(n), m), np.tile(np.arange(m), n)
        joined = _Combinations(
            found.times[before] + times[added],
            found.resident[before] + resident[added],
            np.maximum(found.most[before], most[added]),
            np.column_stack([found.picks[before], added]),
        )
        return joined.taken(np.flatnonzero(joined.resident + joined.most <= memory))

    def _generation(
        self, model: PlannedModel, devices: int, found: _Combinations, column: int
    ) -> np.ndarray:
        """[n]: seconds of the fastest engine of each combination, the transition too."""
        seconds = np.full(len(found.resident), np.inf)
        picked = found.picks[:, column]
        for cut in self.cuts(model, devices):
            cache = self.cache(model, cut.engines, found.resident, cut.weights[picked])
            seconds = np.minimum(
                seconds, cut.transitions[picked] + self.generation(model, cut.engines, cache)
            )
        return seconds

    def entry(self, members: tuple[PlannedModel, ...], candidate: Candidate) -> Entry:
        """A candidate in full."""
        devices = candidate.devices
        order = sorted(members, key=self.generates)
        options = {
            m.name: self.options(m, devices)[pick]
            for m, pick in zip(order, candidate.picks, strict=True)
        }
        resident = sum(options[m.name].bytes.resident for m in order)
        choices = []
        for model in members:
            option = options[model.name]
            choice = (
                self.engine(option, devices, resident) if self.generates(model) else Choice(option)
            )
            assert choice is not None
            choices.append(choice)
        return Entry(devices, candidate.times, tuple(choices))


def after(moved: float, infer: float, train: float) -> tuple[float, float]:
    """What is moved comes before the first stage that there is."""
    return (infer + moved, train) if infer else (infer, train + moved if train else 0.0)
