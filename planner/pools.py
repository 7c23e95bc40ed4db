"""Pools: models that share devices, and every choice of their layouts that a best mapping may have.

For each model alone it lists the layouts that fit (arXiv:2409.19256, appendix C, algorithm 2). For
a pool it combines them, and drops what another combination equals or beats in every figure.

    Option       a model in a training layout: seconds and bytes
    Cut          a way to cut devices into engines, with its cost for each option
    Candidate    a pool with an option per model and its fastest engines: seconds of the step stages
    Choice       an option with the engine that was chosen, in a mapping
    Entry        a pool of a mapping, with a choice per model

Dropping is safe. Seconds of inference and training add up over a pool's models, bytes only grow,
and generation is never slower with more room for the cache. So before the models that generate are
added, a combination can be dropped that another one equals or beats in both times and both sizes. A
pool's finished combinations are compared by their times alone: nothing joins the pool after that,
and pools share no devices.
"""

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

ANY_DP = 1 << 40
"""The limit of dp for a model that neither infers nor trains: larger than any layout."""


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
        """Additional bytes per device in the larger of its phases."""
        return max(self.bytes.training, self.bytes.inference)


@attrs.frozen(eq=False)
class LayoutChoice:
    """A model's layout in a mapping, with its engine where it generates."""

    option: Option
    engines: GenerationLayout | None = None
    """How the pool's devices are cut into engines, of a model that generates."""
    transition: float = 0.0
    """Seconds of bringing the trained weights to the engine."""
    generate: float = 0.0
    """Seconds of generation."""
    weights_bytes: float = 0.0
    """Bytes of the engine's weights on each device, beside the trained ones."""
    cache_bytes: float = 0.0
    """Bytes of the engine's cache on each device."""
    working_bytes: float = 0.0
    """Bytes of the working memory of the engine's passes."""

    @property
    def seconds(self) -> float:
        """Seconds of generation and the transition."""
        return self.transition + self.generate

    @property
    def generating(self) -> float:
        """Bytes of a device that the engine takes while it generates."""
        return self.weights_bytes + self.cache_bytes + self.working_bytes

    def time(self, verb: str) -> float:
        """Return the seconds of a step stage: "generate", "infer" or "train"."""
        times = {"generate": self.seconds, "infer": self.option.infer, "train": self.option.train}
        return times[verb]


@attrs.frozen
class Candidate:
    """A pool that may be part of a best mapping."""

    devices: int
    times: tuple[float, float, float]
    """Seconds of generation with the transition, of inference and of training."""
    picks: tuple[int, ...]
    """Index of each model's option; models that generate come last."""


@attrs.frozen(eq=False)
class FilledPool:
    """A pool in full: its models' choices on `devices` devices, and the seconds of its stages."""

    devices: int
    times: tuple[float, float, float]
    """Seconds of generation with the transition, of inference and of training."""
    choices: tuple[LayoutChoice, ...]


@attrs.frozen(eq=False)
class _Combinations:
    """Layouts of some models of a pool, one combination per row."""

    times: np.ndarray
    """[n, 2]: seconds of inference and of training."""
    resident: np.ndarray
    """[n]: bytes that remain allocated on a device between phases."""
    most: np.ndarray
    """[n]: additional bytes while one of the models works, the largest."""
    picks: np.ndarray
    """[n, models]: index of each model's option."""

    def taken(self, rows: np.ndarray) -> _Combinations:
        """Return the combinations in these rows."""
        return _Combinations(
            self.times[rows], self.resident[rows], self.most[rows], self.picks[rows]
        )

    def front(self) -> _Combinations:
        """Return the combinations that no other equals or beats in all times and sizes."""
        return self.taken(front(np.column_stack([self.times, self.resident, self.most])))


def front(points: np.ndarray) -> np.ndarray:
    """Return the Pareto front of `points` [n, k], as indices of rows.

    A row is left out if another row is at most as large in every column; of equal rows the first
    one stays.
    """
    left = np.lexsort(points.T[::-1])
    rows = []
    while len(left):
        best = left[0]  # least in the first column, then the next: nothing left equals or beats it
        rows.append(best)
        left = left[~(points[left] >= points[best]).all(1)]
    return np.array(rows, dtype=np.int64)


def _figures(option: Option) -> tuple[float, float, float, float]:
    """Return the figures by which options compare: all are better when smaller."""
    return option.infer, option.train, option.bytes.resident, option.most


def divisors(n: int) -> list[int]:
    """Return all divisors of `n`, ascending."""
    return [d for d in range(1, n + 1) if n % d == 0]


@attrs.frozen(eq=False)
class Cut:
    """A way to cut devices into engines, with its cost for each of a model's options."""

    engines: GenerationLayout
    transitions: np.ndarray
    """[options]: seconds of bringing the trained weights to these engines."""
    weights: np.ndarray
    """[options]: bytes that the engine's weights take beside the trained ones."""


def layouts(model: PlannedModel, nodes: Nodes, devices: int, most_dp: int) -> list[ParallelLayout]:
    """Return the training layouts that use all of `devices` and that the model's backend takes.

    tp stays inside a node and divides the model; pp divides the layers; an axis that the backend
    does not have is 1; dp is at most `most_dp`, the number of sequences to share out.
    """
    tensor_sizes = divisors(min(nodes.per_node, devices)) if "tp" in model.axes else [1]
    pipeline_sizes = divisors(model.shape.layers) if "pp" in model.axes else [1]
    choices = []
    for tp in tensor_sizes:
        if devices % tp or model.shape.tensor_parallel_problems(tp):
            continue
        for pp in pipeline_sizes:
            if devices % (tp * pp) or devices // (tp * pp) > most_dp:
                continue
            # dp is devices / (tp pp); backends may refuse layouts for reasons of their own.
            layout = ParallelLayout(pp, tp, devices // (tp * pp))
            if model.takes(layout):
                choices.append(layout)
    return choices


def rollouts(model: PlannedModel, nodes: Nodes, devices: int) -> list[GenerationLayout]:
    """Return the ways to cut `devices` into engines: tp inside a node, pp a power of two.

    pp divides the layers and the devices; both sizes are at most those that the engine supports.
    """
    choices = []
    ranks = ParallelLayout(dp=devices)  # only the number of ranks matters here
    for tp in divisors(min(nodes.per_node, devices)):
        if tp > model.max_rollout_tp or model.shape.tensor_parallel_problems(tp):
            continue
        pp = 1
        # Powers of two that divide the layers.
        while (
            devices % (pp * tp) == 0 and model.shape.layers % pp == 0 and pp <= model.max_rollout_pp
        ):
            choices.append(GenerationLayout(ranks, pp, tp))
            pp *= 2
    return choices


@attrs.frozen(slots=False, eq=False)
class PoolPlanner:
    """Plans pools on one kind of nodes; it keeps each model's options and cuts."""

    nodes: Nodes
    workload: Workload

    @cached_property
    def simulator(self) -> Simulator:
        """The simulator of times on these nodes."""
        return Simulator.of(self.nodes, self.workload)

    @cached_property
    def sizes(self) -> Memory:
        """The memory that models take."""
        return Memory(self.simulator)

    @cached_property
    def _options(self) -> dict[tuple[PlannedModel, int], list[Option]]:
        return {}

    @cached_property
    def _cuts(self) -> dict[tuple[PlannedModel, int], list[Cut]]:
        return {}

    def generates(self, model: PlannedModel) -> bool:
        """Return whether the model generates in a step."""
        return bool(self.workload.of(model.name, "generate"))

    def most_dp(self, model: PlannedModel) -> int:
        """Return the largest dp of use to a model: the sequences of its largest call."""
        sequences = [
            task.sequences
            for task in self.workload.tasks
            if task.role == model.name and task.verb != "generate"
        ]
        return max(sequences, default=ANY_DP)

    def options(self, model: PlannedModel, devices: int) -> list[Option]:
        """Return every layout that fits alone; if the model does not generate, the Pareto front.

        A model that generates keeps all, as its transition's time depends on the layout.
        """
        key = (model, devices)
        if key in self._options:
            return self._options[key]

        # Alone is the best case: with other models the memory gets less.
        options = []
        for layout in layouts(model, self.nodes, devices, self.most_dp(model)):
            option = self.option(model, layout)
            if option.bytes.resident + option.most <= self.nodes.memory:
                options.append(option)
        if options and not self.generates(model):
            points = np.array([_figures(option) for option in options])
            options = [options[i] for i in front(points)]
        self._options[key] = options
        return options

    def cuts(self, model: PlannedModel, devices: int) -> list[Cut]:
        """Return every way to cut `devices` into engines, with its cost for each option of the
        model.
        """
        key = (model, devices)
        if key not in self._cuts:
            options = self.options(model, devices)
            self._cuts[key] = [
                self._cut(model, options, engines)
                for engines in rollouts(model, self.nodes, devices)
            ]
        return self._cuts[key]

    def _cut(
        self, model: PlannedModel, options: Sequence[Option], engines: GenerationLayout
    ) -> Cut:
        transitions = [self.transition(option, engines) for option in options]
        weights = [self.sizes.engine_weights(model, o.layout, engines) for o in options]
        return Cut(engines, np.array(transitions), np.array(weights))

    def option(self, model: PlannedModel, layout: ParallelLayout) -> Option:
        """Return the model in this layout, whether it fits or not."""
        simulator = self.simulator
        taken = self.sizes.bytes(model, layout)
        reads = self.workload.of(model.name, "infer")
        updates = self.workload.of(model.name, "train")
        infer = sum(t.times * simulator.inference(model, t.sequences, layout) for t in reads)
        train = sum(t.times * simulator.update(model, t.sequences, layout) for t in updates)

        # An offloaded model comes from the host and goes back in every call.
        moves = simulator.moves(model, layout, taken.fetched)
        infer += moves * sum(t.times for t in reads)
        train += moves * sum(t.times for t in updates)
        return Option(model, layout, infer, train, taken)

    def cache(
        self,
        model: PlannedModel,
        engines: GenerationLayout,
        resident: Any,
        weights: Any,
        most: Any = 0.0,
    ) -> Any:
        """Return the bytes of a device for an engine's cache; negative where its weights do not
        fit.

        `resident` bytes are taken, `most` more in the largest of the models' phases, and the
        engine's weights take `weights` beside them: numbers, or arrays of one shape, which give an
        array:

            min(usable - resident - weights - max(working, graphs + most of an engine that stays),
                its own limit)
        """
        # Beside the cache there is what its passes work with, or what models train with.
        working = self.sizes.generating(model, engines)
        graphs = model.limits.graphs_gb * GB
        beside = np.maximum(working, most + graphs) if model.keeps_engine else working

        left = self.nodes.memory - resident - weights - beside
        return np.minimum(left, self.cache_limit(model, engines))

    def cache_limit(self, model: PlannedModel, engines: GenerationLayout) -> float:
        """Return the bytes of a device's cache that an engine's own settings allow, at most.

        With M bytes of weights in the engine's dtype,

            min(share * device - M / (t_g p_g), cache_gb, cache_tokens * bytes of a token / cut)
        """
        limits = model.limits
        device = self.nodes.device.memory_gb * GB
        shard = model.size.params * limits.weight_bytes / (engines.pp * engines.tp)
        share = 1.0 if limits.memory_share is None else limits.memory_share
        free = share * device - shard
        if limits.cache_gb is not None:
            free = min(free, limits.cache_gb * GB)
        if limits.cache_tokens is None:
            return free
        cut = min(engines.tp, model.shape.kv_heads) * engines.pp
        return min(free, limits.cache_tokens * model.cache_bytes / cut)

    def generation(self, model: PlannedModel, engines: GenerationLayout, cache: Any) -> Any:
        """Return the seconds of a step's generation, with `cache` bytes of each device: a number or
        array.
        """
        tasks = self.workload.of(model.name, "generate")
        return sum(
            t.times * self.simulator.generation(model, t.sequences, engines, cache) for t in tasks
        )

    def transition(self, option: Option, engines: GenerationLayout) -> float:
        """Return a step's seconds of bringing trained weights to the engine; 0 if frozen."""
        if not option.model.trained:
            return 0.0
        # An offloaded model comes to the device first.
        moves = self.simulator.moves(option.model, option.layout, option.bytes.fetched)
        return self.simulator.transition(option.model, option.layout, engines) + moves

    def engine(
        self,
        option: Option,
        devices: int,
        resident: float,
        engines: GenerationLayout | None = None,
        most: float = 0.0,
    ) -> LayoutChoice | None:
        """Return the option with its fastest engine beside `resident` bytes of each device, and
        `most` more in the largest of the models' phases.

        With `engines` only that cut is tried. None where no engine fits.
        """
        model = option.model
        # Generation and transition count together: the fastest engine may have a slow transition.
        best: LayoutChoice | None = None
        cuts = rollouts(model, self.nodes, devices) if engines is None else [engines]
        for cut in cuts:
            weights = self.sizes.engine_weights(model, option.layout, cut)
            cache = float(self.cache(model, cut, resident, weights, most))
            generate = float(self.generation(model, cut, cache))
            transition = self.transition(option, cut)
            if model.limits.grows:
                cache = min(cache, self.sizes.cache_needed(model, cut))
            working = self.sizes.generating(model, cut)
            choice = LayoutChoice(option, cut, transition, generate, weights, cache, working)
            if choice.generate < np.inf and (best is None or choice.seconds < best.seconds):
                best = choice
        return best

    def moved(self, members: Sequence[PlannedModel]) -> float:
        """Return the seconds of moving a step's columns to these models' pool.

        It is 0 if one of them generates. All rows go through the network of one node: sequences *
        tokens * bytes per token / rate.
        """
        # The largest generation makes the rows of a step.
        generated = [task for task in self.workload.tasks if task.verb == "generate"]
        rows = max((task.sequences * task.times for task in generated), default=0)
        if any(self.generates(m) for m in members) or not rows:
            return 0.0
        size = rows * self.workload.tokens * self.workload.row_bytes
        return size / self.simulator.machine.network_rate

    def candidates(self, members: tuple[PlannedModel, ...], devices: int) -> list[Candidate]:
        """Return the pools of these models on `devices` devices that may be part of a best mapping.

        They are the Pareto front of the seconds of the three step stages.
        """
        # Begin with one empty combination, and add model after model; those that generate come
        # last, as the memory that all layouts leave decides how fast they are.
        zero = np.zeros(1)
        picks = np.zeros((1, 0), dtype=np.int64)
        combinations = _Combinations(np.zeros((1, 2)), zero, zero, picks)
        order = sorted(members, key=self.generates)
        for model in order:
            options = self.options(model, devices)
            combinations = self._with(combinations, options)
            if not len(combinations.resident):  # no room for them together
                return []
            if not self.generates(model):
                combinations = combinations.front()

        # Models that generate do so one after the other, each with its fastest engine.
        generation = np.zeros(len(combinations.resident))
        for column, model in enumerate(order):
            if self.generates(model):
                generation += self._generation(model, devices, combinations, column)

        # [n, 3]: the seconds of the three stages, of which the front stays.
        moved = self.moved(members)
        stages = [
            (generate, *after(moved, infer, train))
            for generate, (infer, train) in zip(generation, combinations.times, strict=True)
        ]
        points = np.array(stages).reshape(-1, 3)
        finite = np.flatnonzero(np.isfinite(generation))

        candidates = []
        for row in finite[front(points[finite])]:
            times = tuple(map(float, points[row]))
            picked = tuple(map(int, combinations.picks[row]))
            candidates.append(Candidate(devices, times, picked))  # type: ignore[arg-type]
        return candidates

    def _with(self, combinations: _Combinations, options: list[Option]) -> _Combinations:
        """Return the combinations times another model's options, where memory is enough."""
        infer, train, resident, most = np.array(list(map(_figures, options))).reshape(-1, 4).T
        times = np.column_stack([infer, train])

        # [n * options]: the row of the combination, and the row of the option.
        count = len(combinations.resident)
        before = np.repeat(np.arange(count), len(options))
        added = np.tile(np.arange(len(options)), count)
        joined = _Combinations(
            combinations.times[before] + times[added],
            combinations.resident[before] + resident[added],
            np.maximum(combinations.most[before], most[added]),
            np.column_stack([combinations.picks[before], added]),
        )
        return joined.taken(np.flatnonzero(joined.resident + joined.most <= self.nodes.memory))

    def _generation(
        self, model: PlannedModel, devices: int, combinations: _Combinations, column: int
    ) -> np.ndarray:
        """[n]: seconds of each combination's fastest engine, with the transition to it."""
        seconds = np.full(len(combinations.resident), np.inf)
        picked = combinations.picks[:, column]
        for cut in self.cuts(model, devices):
            # All combinations at once, with the option that each has of this model.
            weights = cut.weights[picked]
            cache = self.cache(
                model, cut.engines, combinations.resident, weights, combinations.most
            )
            generation = self.generation(model, cut.engines, cache)
            seconds = np.minimum(seconds, cut.transitions[picked] + generation)
        return seconds

    def entry(self, members: tuple[PlannedModel, ...], candidate: Candidate) -> FilledPool:
        """Return a candidate in full, its models in the order of `members`."""
        devices = candidate.devices
        order = sorted(members, key=self.generates)
        options = {
            model.name: self.options(model, devices)[pick]
            for model, pick in zip(order, candidate.picks, strict=True)
        }
        resident = sum(options[m.name].bytes.resident for m in order)
        most = max(options[m.name].most for m in order)

        # Engines are chosen anew: of a candidate only the seconds of its fastest engine are kept.
        choices = []
        for model in members:
            option = options[model.name]
            choice: LayoutChoice | None = LayoutChoice(option)
            if self.generates(model):
                choice = self.engine(option, devices, resident, most=most)
            assert choice is not None
            choices.append(choice)
        return FilledPool(devices, candidate.times, tuple(choices))


def after(moved: float, infer: float, train: float) -> tuple[float, float]:
    """Return the seconds of inference and training, with `moved` added to inference.

    Without inference `moved` is added to training; a pool with neither takes 0 and 0.
    """
    if infer:
        return infer + moved, train
    if train:
        return infer, train + moved
    return infer, 0.0
