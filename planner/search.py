"""The search: the fastest step over all placements, allocations and layouts (arXiv:2409.19256, section 6, algorithm 1).

The space: every partition of the models into pools; a pool has a part of a node or whole nodes, of one kind of device; all its
models use all of its devices, in layouts with tp inside a node; devices may stay idle. The search is exact over it: what is
left out is never better than what is kept in any figure.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence

import attrs
import numpy as np

from hybridflow.core.errors import ConfigError
from hybridflow.core.values.parallel import ParallelLayout
from hybridflow.planner.cluster import Cluster, gigabytes
from hybridflow.planner.pools import Candidate, Entry, PoolPlanner, front, layouts
from hybridflow.planner.workload import PlannedModel, Workload


class NothingFitsError(ConfigError):
    """No mapping has enough memory; says the least that is needed, and of what."""


@attrs.frozen
class Pool:
    """Models that share devices."""

    entry: Entry
    kind: int
    """Which of the cluster's kinds of nodes."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(c.option.model.name for c in self.entry.choices)


@attrs.frozen
class Mapping:
    """Where everything goes, and how long a step takes."""

    pools: tuple[Pool, ...]
    seconds: float
    """Of a step."""
    stages: tuple[float, float, float]
    """Generation with the transition, inference, training."""
    others: tuple[Mapping, ...] = ()
    """The best of other placements, the next best first."""

    @property
    def placement(self) -> frozenset[frozenset[str]]:
        return frozenset(frozenset(pool.names) for pool in self.pools)

    @property
    def devices(self) -> int:
        return sum(pool.entry.devices for pool in self.pools)


def describe(mapping: Mapping) -> str:
    """ "actor+ref on 8 | critic+reward on 8"."""
    return " | ".join(f"{'+'.join(pool.names)} on {pool.entry.devices}" for pool in mapping.pools)


def partitions(items: Sequence) -> Iterator[tuple[tuple, ...]]:
    """All set partitions."""
    if not items:
        yield ()
        return
    first, rest = items[0], items[1:]
    for size in range(len(rest) + 1):
        for others in itertools.combinations(rest, size):
            left = [x for x in rest if x not in others]
            for more in partitions(left):
                yield ((first, *others), *more)


def plan_mapping(
    cluster: Cluster, workload: Workload, models: Sequence[PlannedModel], alternatives: int = 3
) -> Mapping:
    """The mapping whose step takes the least time, and the best of `alternatives` other placements.

    Raises NothingFitsError where no mapping has enough memory, and ConfigError for a workload that does not fit the models.
    """
    models = tuple(models)
    workload.check(models)
    search = _Search(cluster, workload, models)
    found = search.best(alternatives + 1)
    if not found:
        raise NothingFitsError(search.why_not())
    return attrs.evolve(found[0], others=tuple(found[1:]))


class _Front:
    """The entries of a pool on one kind of nodes, as arrays sorted by inference time."""

    def __init__(self, entries: list[Candidate]):
        self.entries = sorted(entries, key=lambda e: (e.times[1], e.devices))
        times = np.array([e.times for e in self.entries], dtype=float).reshape(-1, 3)
        self.generate, self.infer, self.train = times.T
        self.devices = np.array([e.devices for e in self.entries], dtype=np.int64)
        self._stairs: dict[tuple[float, float], tuple[list[float], list[int], list[int]]] = {}

    def stairs(self, generate: float, train: float) -> tuple[list[float], list[int], list[int]]:
        """Of entries within these times: (inference times, the least devices up to each, and which entry has them)."""
        at = (generate, train)
        if at not in self._stairs:
            good = np.flatnonzero((self.generate <= generate) & (self.train <= train))
            devices = self.devices[good]
            least = np.minimum.accumulate(devices) if len(good) else devices
            first = (
                np.concatenate([[True], least[1:] < least[:-1]]) if len(good) else np.zeros(0, bool)
            )
            self._stairs[at] = (
                self.infer[good][first].tolist(),
                least[first].tolist(),
                good[first].tolist(),
            )
        return self._stairs[at]


class _Search:
    def __init__(self, cluster: Cluster, workload: Workload, models: tuple[PlannedModel, ...]):
        self.cluster, self.models = cluster, models
        self.planners = [PoolPlanner(nodes, workload, models) for nodes in cluster.nodes]
        self.fronts: dict[tuple[tuple[str, ...], int], _Front] = {}

    def best(self, count: int) -> list[Mapping]:
        """The best mapping of each of the `count` best placements."""
        found: list[Mapping] = []
        for placement in sorted(partitions(self.models), key=len):
            bound = found[count - 1].seconds if len(found) >= count else float("inf")
            mapping = self._placement(placement, bound)
            if mapping is not None:
                found = sorted([*found, mapping], key=lambda m: m.seconds)[:count]
        return found

    def front(self, members: tuple[PlannedModel, ...], kind: int) -> _Front:
        """Every pool of these models that may count: fewer devices or less time in some stage."""
        at = (tuple(m.name for m in members), kind)
        if at not in self.fronts:
            planner = self.planners[kind]
            every = [e for size in planner.nodes.sizes() for e in planner.candidates(members, size)]
            points = np.array([(e.devices, *e.times) for e in every]).reshape(-1, 4)
            self.fronts[at] = _Front([every[i] for i in front(points)])
        return self.fronts[at]

    def _placement(
        self, placement: tuple[tuple[PlannedModel, ...], ...], bound: float
    ) -> Mapping | None:
        best: Mapping | None = None
        for kinds in itertools.product(range(len(self.cluster.nodes)), repeat=len(placement)):
            fronts = [
                self.front(members, kind) for members, kind in zip(placement, kinds, strict=True)
            ]
            if any(not f.entries for f in fronts):
                continue
            chosen = self._allocate(fronts, kinds, min(bound, best.seconds if best else bound))
            if chosen is not None:
                stages = tuple(max(e.times[s] for e in chosen) for s in range(3))
                pools = tuple(
                    Pool(self.planners[kind].entry(members, candidate), kind)
                    for members, candidate, kind in zip(placement, chosen, kinds, strict=True)
                )
                best = Mapping(pools, sum(stages), stages)  # type: ignore[arg-type]
        return best

    def _allocate(
        self, fronts: list[_Front], kinds: Sequence[int], bound: float
    ) -> list[Candidate] | None:
        """One entry of each front: the least sum of the stages' slowest, below `bound`, with the devices that there are.

        The entry of one pool (the one that generates) is tried after the other, then the time that training may take, from
        the least up; the least time of inference with enough devices follows by bisection.
        """
        budgets = [nodes.devices for nodes in self.cluster.nodes]
        anchor = max(
            range(len(fronts)), key=lambda i: (fronts[i].generate.max(), len(fronts[i].entries))
        )
        others = [i for i in range(len(fronts)) if i != anchor]
        first = fronts[anchor]
        least = [
            sum(int(fronts[i].devices.min()) for i in others if kinds[i] == kind)
            for kind in range(len(budgets))
        ]
        floor = [
            max((float(getattr(fronts[i], s).min()) for i in others), default=0.0)
            for s in ("generate", "infer", "train")
        ]
        order = np.argsort(np.maximum(first.generate, floor[0]) + np.maximum(first.infer, floor[1])
                           + np.maximum(first.train, floor[2]), kind="stable")  # fmt: skip
        chosen: list[Candidate] | None = None
        generations = sorted({float(t) for i in others for t in fronts[i].generate if t > 0})
        trainings = sorted({float(t) for i in others for t in fronts[i].train})
        for at in order:
            entry = first.entries[at]
            g, i, t = entry.times
            if max(g, floor[0]) + max(i, floor[1]) + max(t, floor[2]) >= bound:
                break
            left = list(budgets)
            left[kinds[anchor]] -= entry.devices
            if any(have < need for have, need in zip(left, least, strict=True)):
                continue
            for generate in (g, *generations[bisect_left(generations, g) :]):
                if generate < floor[0]:
                    continue
                for train in (t, *trainings[bisect_left(trainings, t) :]):
                    if train < floor[2]:
                        continue
                    if generate + max(i, floor[1]) + train >= bound:
                        break
                    within = self._least_infer(
                        fronts, others, kinds, left, generate, train, i, bound - generate - train
                    )
                    if within is None:
                        continue
                    infer, picked = within
                    bound = generate + infer + train
                    chosen = [
                        entry if j == anchor else fronts[j].entries[picked[j]]
                        for j in range(len(fronts))
                    ]
                if generate + max(i, floor[1]) + max(t, floor[2]) >= bound:
                    break
        return chosen

    def _least_infer(
        self, fronts: list[_Front], others: list[int], kinds: Sequence[int], left: list[int],
        generate: float, train: float, infer: float, below: float,
    ) -> tuple[float, dict[int, int]] | None:  # fmt: skip
        """(the least time of inference, entry of each other pool), at least `infer` and below `below`; None where there are
        not enough devices."""
        stairs = [(j, *fronts[j].stairs(generate, train)) for j in others]

        def pick(limit: float) -> dict[int, int] | None:
            """The least devices of each pool within `limit`, where they are there."""
            used = list(left)
            picked = {}
            for j, times, devices, entries in stairs:
                step = bisect_right(times, limit) - 1
                if step < 0:
                    return None
                used[kinds[j]] -= devices[step]
                if used[kinds[j]] < 0:
                    return None
                picked[j] = entries[step]
            return picked

        if pick(below) is None:
            return None
        limits = sorted(
            {infer, *(t for _, times, _, _ in stairs for t in times if infer < t < below)}
        )
        low, high = 0, len(limits)
        while low < high:
            middle = (low + high) // 2
            if pick(limits[middle]) is None:
                low = middle + 1
            else:
                high = middle
        if low == len(limits) or limits[low] >= below:
            return None
        picked = pick(limits[low])
        assert picked is not None
        return limits[low], picked

    def why_not(self) -> list[str]:
        """What is lacking: for each model alone, then for all together."""
        problems = [problem for model in self.models if (problem := self._alone(model))]
        return problems or [self._together()]

    def _alone(self, model: PlannedModel) -> str | None:
        """Why a model fits nowhere; None where it does, alone."""
        least: list[tuple[float, float, PoolPlanner, int, ParallelLayout]] = []
        for planner in self.planners:
            for size in planner.nodes.sizes():
                if planner.candidates((model,), size):
                    return None
                for layout in layouts(model, planner.nodes, size, planner.most_dp(model)):
                    option = planner.option(model, layout)
                    need = option.bytes.resident + option.most
                    least.append((need - planner.memory((model,)), need, planner, size, layout))
        head = f"{model.name} ({model.size.params / 1e9:.1f} billion parameters)"
        if not least:
            return (
                f"{head}: its backend takes no layout of it on the sizes that a pool can have here; look at the settings that "
                "ask for tp, pp or dp, at sizes that tp must divide (heads, vocabulary), and whether it takes such models"
                + (" (this one is a mixture of experts)" if model.shape.experts else "")
            )
        over, need, planner, size, layout = min(least, key=lambda found: found[:2])
        if over <= 0:
            return (
                f"{head} fits, and its engine does not: no layout leaves room for the engine's weights and the cache of one "
                "sequence; give more devices, or the engine more memory"
            )
        return (
            f"{head} fits nowhere: the least is {gigabytes(need)} per device, on {size} {planner.nodes.device.name} with pp "
            f"{layout.pp}, tp {layout.tp}, dp {layout.dp}, and {gigabytes(need - over)} are usable"
            f"{planner.engines_keep([model])}; give it more or larger devices"
        )

    def _together(self) -> str:
        total = sum(
            min(p.sizes.bytes(m, layout).resident * size for p in self.planners for size in p.nodes.sizes()
                for layout in layouts(m, p.nodes, size, p.most_dp(m)))
            for m in self.models
        )  # fmt: skip
        have = sum(nodes.devices * nodes.memory for nodes in self.cluster.nodes)
        return (
            f"each model fits alone, and no placement of all {len(self.models)} does: their weights, gradients and optimizers "
            f"take at least {gigabytes(total)} of the {gigabytes(have)} that are usable on {self.cluster.devices} devices, and "
            "activations and the cache come to that; give more devices, or set offload or recompute"
        )
