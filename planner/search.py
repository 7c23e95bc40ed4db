"""The search for the fastest step over all placements, allocations and layouts.

It follows arXiv:2409.19256, section 6 (algorithm 1, device mapping) and appendix C (algorithm 2,
layouts), but searches exactly: for whatever is left out, something is kept that is at least as good
in every figure (pools.py says why that is safe).

The space has every partition of the models into pools. A pool has a part of a node or whole nodes,
all of one kind of device. Each of its models uses all of its devices, in a layout with tp inside a
node. Devices may stay idle.

A placement of two pools, and its step:

    actor+ref on 8      | actor: sync, generate | ref           | actor train         |
    critic+reward on 8  | idle                  | critic reward | critic train | idle |
                        0 ------------------------------------------------------------> seconds
      step stages         generation              inference       training

The models of a pool work one after the other, pools work side by side, and a step stage ends with
its slowest pool. So a step takes (algorithm 1, d_cost)

    seconds = sum over step stages s of max over pools P of sum over models m in P of t(m, s)
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property

import attrs
import numpy as np

from hybridflow.core.errors import ConfigError
from hybridflow.core.values.parallel import ParallelLayout
from hybridflow.planner.cluster import Cluster, gigabytes
from hybridflow.planner.pools import Candidate, FilledPool, PoolPlanner, front, layouts
from hybridflow.planner.workload import PlannedModel, Workload


class NothingFitsError(ConfigError):
    """No mapping has enough memory; the message names the models and the least memory needed."""


@attrs.frozen
class PlannedPool:
    """Models that share devices."""

    entry: FilledPool
    kind: int
    """Index of the pool's kind of nodes in `Cluster.nodes`."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the models, in the order in which they work."""
        return tuple(c.option.model.name for c in self.entry.choices)


@attrs.frozen
class Mapping:
    """A placement with its devices and layouts, and how long a step takes with it."""

    pools: tuple[PlannedPool, ...]
    seconds: float
    """Duration of one step."""
    stages: tuple[float, float, float]
    """Seconds of generation (with the transition of weights), of inference and of training."""
    others: tuple[Mapping, ...] = ()
    """The best mapping of each of the next best placements, the fastest first."""

    @property
    def placement(self) -> frozenset[frozenset[str]]:
        """The names of the models, pool by pool, without an order."""
        return frozenset(frozenset(pool.names) for pool in self.pools)

    @property
    def devices(self) -> int:
        """The number of devices of all pools together."""
        return sum(pool.entry.devices for pool in self.pools)


def describe(mapping: Mapping) -> str:
    """Return a mapping in a line: "actor+ref on 8 | critic+reward on 8"."""
    return " | ".join(f"{'+'.join(pool.names)} on {pool.entry.devices}" for pool in mapping.pools)


def slowest(times: Sequence[tuple[float, float, float]]) -> tuple[float, float, float]:
    """Return the seconds of each step stage with these pools side by side: each ends with its
    slowest pool.
    """
    generate = max((time[0] for time in times), default=0.0)
    infer = max((time[1] for time in times), default=0.0)
    train = max((time[2] for time in times), default=0.0)
    return generate, infer, train


def partitions(items: Sequence) -> Iterator[tuple[tuple, ...]]:
    """Yield all partitions of a set into non-empty parts: 15 for four items (the Bell numbers)."""
    if not items:
        yield ()
        return

    # Each partition puts the first item together with some others, and partitions those left.
    first = items[0]
    rest = items[1:]
    for size in range(len(rest) + 1):
        for companions in itertools.combinations(rest, size):
            remaining = [item for item in rest if item not in companions]
            for parts in partitions(remaining):
                yield ((first, *companions), *parts)


Stairs = tuple[list[float], list[int], list[int]]
"""The fewest devices needed under each limit on the seconds of inference: three lists, as

    seconds of inference up to    2.0   3.5   8.0
    fewest devices from there on   16     8     4
    index of the candidate          5     2     9
"""


class _Front:
    """The candidates of a pool on one kind of nodes, as arrays [n] sorted by inference time."""

    def __init__(self, entries: list[Candidate]):
        self.entries = sorted(entries, key=lambda e: (e.times[1], e.devices))
        times = np.array([e.times for e in self.entries], dtype=float).reshape(-1, 3)
        self.generate, self.infer, self.train = times.T
        self.devices = np.array([e.devices for e in self.entries], dtype=np.int64)
        self._stairs: dict[tuple[float, float], Stairs] = {}

    def least(self) -> tuple[float, float, float]:
        """Return the least seconds of each step stage, whichever candidate has them."""
        return float(self.generate.min()), float(self.infer.min()), float(self.train.min())

    def stairs(self, generate: float, train: float) -> Stairs:
        """Return the stairs of the candidates that generate and train within these times."""
        key = (generate, train)
        if key not in self._stairs:
            self._stairs[key] = self._find_stairs(generate, train)
        return self._stairs[key]

    def _find_stairs(self, generate: float, train: float) -> Stairs:
        within = np.flatnonzero((self.generate <= generate) & (self.train <= train))
        if not len(within):
            return [], [], []

        # Sorted by inference time, a candidate counts if it needs fewer devices than all before it.
        least = np.minimum.accumulate(self.devices[within])
        steps = np.concatenate([[True], least[1:] < least[:-1]])
        entries = within[steps]
        return self.infer[entries].tolist(), least[steps].tolist(), entries.tolist()


class Fronts(PoolPlanner):
    """The candidates of pools on one kind of nodes, which many placements and searches share."""

    @cached_property
    def _fronts(self) -> dict[tuple[PlannedModel, ...], _Front]:
        return {}

    def front(self, members: tuple[PlannedModel, ...]) -> _Front:
        """Return the pools of these models, without those that another one equals or beats.

        Compared are the devices and the seconds of the three step stages.
        """
        if members not in self._fronts:
            candidates: list[Candidate] = []
            for size in self.nodes.sizes():
                candidates += self.candidates(members, size)
            figures = [(c.devices, *c.times) for c in candidates]
            points = np.array(figures).reshape(-1, 4)
            self._fronts[members] = _Front([candidates[i] for i in front(points)])
        return self._fronts[members]


def plan_mapping(
    cluster: Cluster,
    workload: Workload,
    models: Sequence[PlannedModel],
    alternatives: int = 3,
    fronts: Sequence[Fronts] | None = None,
) -> Mapping:
    """Return the mapping with the fastest step, and the best of `alternatives` other placements.

    fronts: of each kind of nodes, from earlier searches of this workload; pools whose models are
    the same objects are not searched again.

    Raises NothingFitsError where no mapping has enough memory, and ConfigError for a workload that
    does not fit the models.
    """
    models = tuple(models)
    workload.check(models)
    search = _Search(cluster, fronts or [Fronts(n, workload) for n in cluster.nodes], models)

    # The best placement, and those that come next.
    mappings = search.best(alternatives + 1)
    if not mappings:
        raise NothingFitsError(search.why_not())
    return attrs.evolve(mappings[0], others=tuple(mappings[1:]))


class _Search:
    """One search for the placement, the pools and the layouts of models on a cluster."""

    def __init__(
        self, cluster: Cluster, planners: Sequence[Fronts], models: tuple[PlannedModel, ...]
    ):
        self.cluster = cluster
        self.planners = planners
        self.models = models

    def best(self, count: int) -> list[Mapping]:
        """Return the best mapping of each of the `count` best placements."""
        # Few pools first: they are quick to search, and bound the others.
        mappings: list[Mapping] = []
        for placement in sorted(partitions(self.models), key=len):
            bound = mappings[count - 1].seconds if len(mappings) >= count else float("inf")
            mapping = self._placement(placement, bound)
            if mapping is not None:
                mappings = sorted([*mappings, mapping], key=lambda m: m.seconds)[:count]
        return mappings

    def _placement(
        self, placement: tuple[tuple[PlannedModel, ...], ...], bound: float
    ) -> Mapping | None:
        """Return a placement's best mapping; None where none fits and is faster than `bound`."""
        # Every way to put the pools on kinds of nodes.
        best: Mapping | None = None
        for kinds in itertools.product(range(len(self.cluster.nodes)), repeat=len(placement)):
            fronts = [
                self.planners[kind].front(members)
                for members, kind in zip(placement, kinds, strict=True)
            ]
            if any(not f.entries for f in fronts):
                continue

            chosen = self._allocate(fronts, kinds, min(bound, best.seconds if best else bound))
            if chosen is not None:
                stages = slowest([candidate.times for candidate in chosen])
                pools = tuple(
                    PlannedPool(self.planners[kind].entry(members, candidate), kind)
                    for members, candidate, kind in zip(placement, chosen, kinds, strict=True)
                )
                best = Mapping(pools, sum(stages), stages)
        return best

    def _allocate(
        self, fronts: list[_Front], kinds: Sequence[int], bound: float
    ) -> list[Candidate] | None:
        """Return the candidates, one of each front, with the fastest step that the devices allow.

        None where no step is faster than `bound`. Candidates of one pool, the anchor (the one that
        generates the longest, any pool if none does), are tried one after the other, by the best
        step that each allows:

            lower bound = sum over step stages of max(the anchor's, the least of the other pools)

        Then come limits of generation and of training, from the least up. Only times that some
        candidate has are tried: between two of them nothing changes. The least inference time
        with enough devices follows by bisection.
        """
        budgets = [nodes.devices for nodes in self.cluster.nodes]
        anchor = _anchor(fronts)
        others = [i for i in range(len(fronts)) if i != anchor]
        reserved = _least_devices(fronts, others, kinds, len(budgets))
        floor = _least_times(fronts, others)

        # The anchor's candidates by their lower bound: `break` once that is too slow.
        first = fronts[anchor]
        optimistic = np.maximum(first.generate, floor[0]) + np.maximum(first.infer, floor[1])
        optimistic = optimistic + np.maximum(first.train, floor[2])
        generations = _distinct(fronts[i].generate[fronts[i].generate > 0] for i in others)
        trainings = _distinct(fronts[i].train for i in others)

        chosen: list[Candidate] | None = None
        for row in np.argsort(optimistic, kind="stable"):
            entry = first.entries[row]
            g, i, t = entry.times
            if max(g, floor[0]) + max(i, floor[1]) + max(t, floor[2]) >= bound:
                break

            # Skip it where it leaves too few devices for the others.
            left = list(budgets)
            left[kinds[anchor]] -= entry.devices
            if any(have < need for have, need in zip(left, reserved, strict=True)):
                continue

            # Other pools may take longer than the anchor: try each time that one of them has.
            for generate in (g, *generations[bisect_left(generations, g) :]):
                if generate < floor[0]:
                    continue
                for train in (t, *trainings[bisect_left(trainings, t) :]):
                    if train < floor[2]:
                        continue
                    if generate + max(i, floor[1]) + train >= bound:
                        break
                    remaining = bound - generate - train
                    allocation = self._least_infer(
                        fronts, others, kinds, left, generate, train, i, remaining
                    )
                    # A better step lowers the bound for all that follow.
                    if allocation is not None:
                        infer, picked = allocation
                        bound = generate + infer + train
                        chosen = [fronts[j].entries[picked[j]] for j in others]
                        chosen.insert(anchor, entry)
                # Longer generations are too slow even with the least training.
                if generate + max(i, floor[1]) + max(t, floor[2]) >= bound:
                    break
        return chosen

    def _least_infer(
        self,
        fronts: list[_Front],
        others: list[int],
        kinds: Sequence[int],
        left: list[int],
        generate: float,
        train: float,
        infer: float,
        below: float,
    ) -> tuple[float, dict[int, int]] | None:
        """Return the least inference time for which the devices `left` of each kind are enough.

        It is at least `infer` and below `below`. Comes with the candidate's index of each other
        pool; None where there are not enough devices. Devices needed fall as the limit on inference
        rises, so bisection finds the least.
        """
        stairs = [(j, *fronts[j].stairs(generate, train)) for j in others]

        def pick(limit: float) -> dict[int, int] | None:
            """Return each pool's candidate with the least devices within `limit`, where that is
            enough.
            """
            unused = list(left)
            picked = {}
            for j, times, devices, entries in stairs:
                step = bisect_right(times, limit) - 1
                if step < 0:
                    return None
                unused[kinds[j]] -= devices[step]
                if unused[kinds[j]] < 0:
                    return None
                picked[j] = entries[step]
            return picked

        # Not even the loosest limit is enough.
        if pick(below) is None:
            return None

        # Between two candidates' times nothing changes, so these are the limits to try.
        limits = {infer}
        for _, times, _, _ in stairs:
            limits.update(time for time in times if infer < time < below)
        ordered = sorted(limits)

        # The first limit that is enough.
        low = 0
        high = len(ordered)
        while low < high:
            middle = (low + high) // 2
            if pick(ordered[middle]) is None:
                low = middle + 1
            else:
                high = middle
        if low == len(ordered) or ordered[low] >= below:
            return None

        picked = pick(ordered[low])
        assert picked is not None
        return ordered[low], picked

    def why_not(self) -> list[str]:
        """Return reasons why nothing fits.

        There is one for each model that does not fit alone; if all do, one for them together.
        """
        problems = [problem for model in self.models if (problem := self._alone(model))]
        return problems or [self._together()]

    def _alone(self, model: PlannedModel) -> str | None:
        """Return why a model fits nowhere even alone, or None if it fits."""
        # The bytes that each layout needs, and how many of them are missing.
        needs: list[tuple[float, float, Fronts, int, ParallelLayout]] = []
        for planner in self.planners:
            for size in planner.nodes.sizes():
                if planner.candidates((model,), size):
                    return None
                for layout in layouts(model, planner.nodes, size, planner.most_dp(model)):
                    option = planner.option(model, layout)
                    need = option.bytes.resident + option.most
                    needs.append((need - planner.nodes.memory, need, planner, size, layout))

        head = f"{model.name} ({model.size.params / 1e9:.1f} billion parameters)"
        if not needs:
            experts = " (this one is a mixture of experts)" if model.shape.experts else ""
            return (
                f"{head}: its backend takes no layout of it on the sizes that a pool can have "
                "here; look at the settings that ask for tp, pp or dp, at sizes that tp must "
                "divide (heads, vocabulary), and whether it takes such models" + experts
            )

        # The layout that comes nearest to fitting.
        over, need, planner, size, layout = min(needs, key=lambda row: row[:2])
        if over <= 0:
            return (
                f"{head} fits, and its engine does not: no layout leaves room for the engine's "
                "weights and the cache of one sequence; give more devices, or the engine more "
                f"memory{_frees(model)}"
            )
        return (
            f"{head} fits nowhere: the least is {gigabytes(need)} per device, on {size} "
            f"{planner.nodes.device.name} with pp {layout.pp}, tp {layout.tp}, dp {layout.dp}, "
            f"and {gigabytes(need - over)} are usable; give it more or larger devices"
        )

    def _together(self) -> str:
        """Return why models that fit alone do not fit together."""
        total = sum(self._least_resident(model) for model in self.models)
        have = sum(nodes.devices * nodes.memory for nodes in self.cluster.nodes)
        return (
            f"each model fits alone, and no placement of all {len(self.models)} does: their "
            "weights, gradients and optimizers take at least "
            f"{gigabytes(total)} of the {gigabytes(have)} that are usable on "
            f"{self.cluster.devices} devices, and activations and the cache come to that; give "
            "more devices, or set offload or recompute"
        )

    def _least_resident(self, model: PlannedModel) -> float:
        """Return the bytes on all devices that a model takes between its phases, in its smallest
        layout.
        """
        # On all kinds of nodes, and all sizes of a pool.
        totals: list[float] = []
        for planner in self.planners:
            most_dp = planner.most_dp(model)
            for size in planner.nodes.sizes():
                for layout in layouts(model, planner.nodes, size, most_dp):
                    totals.append(planner.sizes.bytes(model, layout).resident * size)
        return min(totals)


def _frees(model: PlannedModel) -> str:
    """Return the end of a message: how to free what an engine keeps while models train."""
    return f", or set {model.name}.generation.keep = false" if model.keeps_engine else ""


def _anchor(fronts: list[_Front]) -> int:
    """Return the index of the pool that generates the longest; of equals the one with most
    candidates.
    """

    def weight(i: int) -> tuple[float, int]:
        return fronts[i].generate.max(), len(fronts[i].entries)

    return max(range(len(fronts)), key=weight)


def _least_devices(
    fronts: list[_Front], pools: Sequence[int], kinds: Sequence[int], count: int
) -> list[int]:
    """Return, for each of `count` kinds of nodes, the fewest devices that these pools need."""
    least = [0] * count
    for pool in pools:
        least[kinds[pool]] += int(fronts[pool].devices.min())
    return least


def _least_times(fronts: list[_Front], pools: Sequence[int]) -> tuple[float, float, float]:
    """Return a lower bound of the seconds of each step stage for these pools, in any allocation."""
    return slowest([fronts[pool].least() for pool in pools])


def _distinct(arrays: Iterator[np.ndarray]) -> list[float]:
    """Return all numbers of the arrays, each once, sorted."""
    numbers: set[float] = set()
    for array in arrays:
        numbers.update(array.tolist())
    return sorted(numbers)
