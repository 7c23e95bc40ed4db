"""Models that share devices: every choice of their layouts that may be part of a best mapping."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

import attrs

from hybridflow.core.mapping.cluster import GB, Nodes
from hybridflow.core.mapping.simulate import Bytes, Simulator
from hybridflow.core.mapping.workload import PlannedModel, Workload
from hybridflow.core.resharding.layouts import check_tensor_parallel

Layout = tuple[int, int, int]
"""(pp, tp, dp)"""


@attrs.frozen(eq=False)
class Option:
    """A model in a layout: seconds per step, bytes per device."""

    model: PlannedModel
    layout: Layout
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
    rollout: tuple[int, int] | None = None
    """(pp, tp) of an engine, for a model that generates."""
    transition: float = 0.0
    generate: float = 0.0
    cache_bytes: float = 0.0
    """Free for the engine's cache on each device."""


@attrs.frozen(eq=False)
class Entry:
    """A pool: its models' choices on `devices` devices, and the seconds of its stages."""

    devices: int
    times: tuple[float, float, float]
    """Generation with the transition, inference, training."""
    choices: tuple[Choice, ...]


@attrs.frozen(eq=False)
class _Partial:
    """Some models of a pool."""

    infer: float
    train: float
    resident: float
    most: float
    options: tuple[Option, ...]

    @property
    def key(self) -> tuple[float, float, float, float]:
        return self.infer, self.train, self.resident, self.most


def front(items: Iterable, key) -> list:
    """Those that no other one is at least as good as in every figure; of equals the first."""
    kept: list = []
    keys: list[tuple] = []
    for item in sorted(items, key=key):
        mine = key(item)
        if not any(all(a <= b for a, b in zip(other, mine, strict=True)) for other in keys):
            kept.append(item)
            keys.append(mine)
    return kept


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def layouts(model: PlannedModel, nodes: Nodes, devices: int, most_dp: int) -> list[Layout]:
    """Those that use all of `devices`: tp inside a node and dividing the model, pp dividing the layers (of pipelined ones
    alone), dp at most the sequences there are to share."""
    found = []
    for tp in divisors(min(nodes.per_node, devices)):
        if tp > model.max_tp or devices % tp or check_tensor_parallel(model.shape, tp):
            continue
        for pp in divisors(model.shape.layers) if model.pipelined else [1]:
            if pp <= model.max_pp and devices % (tp * pp) == 0 and devices // (tp * pp) <= most_dp:
                found.append((pp, tp, devices // (tp * pp)))
    return found


def rollouts(model: PlannedModel, nodes: Nodes, devices: int) -> list[tuple[int, int]]:
    """(pp, tp) of engines on `devices`: tp inside a node, one stage or as many as divide the layers, in powers of two."""
    found = []
    for tp in divisors(min(nodes.per_node, devices)):
        if tp > model.max_rollout_tp or check_tensor_parallel(model.shape, tp):
            continue
        pp = 1
        while devices % (pp * tp) == 0 and model.shape.layers % pp == 0 and pp <= model.max_rollout_pp:
            found.append((pp, tp))
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
    def _kept(self) -> dict:
        return {}

    def generates(self, model: PlannedModel) -> bool:
        return bool(self.workload.of(model.name, "generate"))

    def most_dp(self, model: PlannedModel) -> int:
        shared = [t.sequences for t in self.workload.tasks if t.role == model.name and t.verb != "generate"]
        return min(shared, default=1 << 40)

    def options(self, model: PlannedModel, devices: int) -> list[Option]:
        """Every layout that fits alone; of models that do not generate those that are not dominated."""
        at = (model.name, devices)
        if at in self._kept:
            return self._kept[at]
        found = []
        for layout in layouts(model, self.nodes, devices, self.most_dp(model)):
            option = self.option(model, layout)
            if option.bytes.resident + option.most <= self.nodes.memory:
                found.append(option)
        if not self.generates(model):
            found = front(found, lambda o: (o.infer, o.train, o.bytes.resident, o.most))
        self._kept[at] = found
        return found

    def option(self, model: PlannedModel, layout: Layout) -> Option:
        sim = self.simulator
        infer = sum(t.times * sim.inference(model, t.sequences, layout) for t in self.workload.of(model.name, "infer"))
        train = sum(t.times * sim.update(model, t.sequences, layout) for t in self.workload.of(model.name, "train"))
        return Option(model, layout, infer, train, sim.bytes(model, layout))

    def engine(self, model: PlannedModel, layout: Layout, rollout: tuple[int, int], free: float) -> Choice | None:
        """The seconds of its generation per step with `free` bytes for its weights and cache; None where they are too few."""
        sim = self.simulator
        devices = layout[0] * layout[1] * layout[2]
        cache = free - sim.engine_weights(model, layout, rollout)
        seconds = 0.0
        for task in self.workload.of(model.name, "generate"):
            once = sim.generation(model, task.sequences, devices, rollout, cache)
            if once is None:
                return None
            seconds += task.times * once
        return Choice(
            _NO_OPTION, rollout, sim.transition(model, layout, rollout) if model.trained else 0.0, seconds, cache
        )

    def moved(self, members: Sequence[PlannedModel]) -> float:
        """Seconds of a step's columns to a pool in which nothing generates."""
        rows = max((t.sequences * t.times for t in self.workload.tasks if t.verb == "generate"), default=0)
        if any(self.generates(m) for m in members) or not rows:
            return 0.0
        return rows * self.workload.tokens * self.workload.row_bytes / self.simulator.machine.network_rate

    def entries(self, members: tuple[PlannedModel, ...], devices: int) -> list[Entry]:
        """The pools of these models on so many devices that no other is better than in all three stages."""
        partials = [_Partial(0.0, 0.0, 0.0, 0.0, ())]
        for model in (m for m in members if not self.generates(m)):
            partials = self._with(partials, self.options(model, devices))
        moved = self.moved(members)
        generators = [m for m in members if self.generates(m)]
        if not generators:
            made = [
                Entry(devices, (0.0, *_after(moved, p.infer, p.train)), tuple(map(Choice, p.options))) for p in partials
            ]
            return front(made, lambda e: e.times)
        combined = [(p, ()) for p in partials]
        for model in generators:
            options = self.options(model, devices)
            combined = [
                (joined, (*mine, option))
                for partial, mine in combined
                for option in options
                if (joined := self._joined(partial, option)) is not None
            ]
        made = []
        for partial, mine in combined:
            made += self._generating(devices, partial, mine)
        return front(made, lambda e: e.times)

    def _joined(self, p: _Partial, o: Option) -> _Partial | None:
        resident, most = p.resident + o.bytes.resident, max(p.most, o.most)
        if resident + most > self.nodes.memory:
            return None
        return _Partial(p.infer + o.infer, p.train + o.train, resident, most, (*p.options, o))

    def _with(self, partials: list[_Partial], options: list[Option]) -> list[_Partial]:
        joined = (self._joined(p, o) for p in partials for o in options)
        return front((j for j in joined if j is not None), lambda p: p.key)

    def _generating(self, devices: int, partial: _Partial, mine: tuple[Option, ...]) -> list[Entry]:
        """The best engine for each generating model (its layout is given, so only its own time counts)."""
        free = self.nodes.memory - partial.resident
        choices = [Choice(o) for o in partial.options if o not in mine]
        seconds = 0.0
        for option in mine:
            best: Choice | None = None
            for rollout in rollouts(option.model, self.nodes, devices):
                found = self.engine(option.model, option.layout, rollout, free)
                if found and (best is None or found.generate + found.transition < best.generate + best.transition):
                    best = found
            if best is None:
                return []
            choices.append(attrs.evolve(best, option=option))
            seconds += best.generate + best.transition
        order = {m.name: i for i, m in enumerate(self.models)}
        choices.sort(key=lambda c: order[c.option.model.name])
        return [Entry(devices, (seconds, partial.infer, partial.train), tuple(choices))]


_NO_OPTION: Option = None  # type: ignore[assignment]


def _after(moved: float, infer: float, train: float) -> tuple[float, float]:
    """What is moved comes before the first stage that there is."""
    return (infer + moved, train) if infer else (infer, train + moved if train else 0.0)


def gigabytes(size: float) -> str:
    return f"{size / GB:.1f} GB"
