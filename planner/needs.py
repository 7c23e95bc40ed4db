"""What the models of a placed pool take of one device: each phase, and what is left to engines.

With R, the bytes at rest of all models, and for each engine W of weights beside the trained ones,
C of cache and G that its passes work with,

    role reads or trains       R + its additional bytes + W + C of engines that stay
    role generates             R + W + C + G

The largest counts. Nothing else is on the device while a phase runs: models work one after the
other.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from hybridflow.core.contracts.footprint import EngineRoom
from hybridflow.core.contracts.planner import PoolMemory
from hybridflow.core.values.parallel import GenerationLayout
from hybridflow.planner.cluster import GB
from hybridflow.planner.pools import Option, PoolPlanner
from hybridflow.planner.workload import PlannedModel

Parts = tuple[tuple[str, float], ...]


@attrs.frozen(eq=False)
class Member:
    """A role on a pool: its model, its engine, or both."""

    model: PlannedModel
    option: Option | None = None
    """The model in its layout; None where the pool has its engine alone."""
    engines: GenerationLayout | None = None
    """How the pool's devices are cut into its engines; None where it has none here."""


@attrs.frozen
class EngineBytes:
    """Bytes of an engine on a device."""

    weights: float
    cache: float
    working: float
    """What its passes work with, while it generates."""
    room: EngineRoom

    def at_rest(self, model: PlannedModel) -> float:
        """Return what stays while models read and train."""
        if model.keeps_engine:
            return self.weights + self.cache
        return self.weights if model.limits.stays else 0.0


def pool_memory(
    planner: PoolPlanner, pool: str, members: Sequence[Member], yields: bool = True
) -> PoolMemory:
    """Return the fullest moment of a pool, and what its models leave to engines.

    yields: whether engines' caches get smaller where models leave less than they may take.
    """
    options = [member.option for member in members if member.option is not None]
    resident = sum(option.bytes.resident for option in options)
    most = max((option.most for option in options), default=0.0)
    engines = {
        member.model.name: _engine(planner, member, resident, most, yields)
        for member in members
        if member.engines is not None
    }
    stays = sum(
        engines[member.model.name].at_rest(member.model)
        for member in members
        if member.engines is not None
    )

    # The phases, the fullest first.
    rest = tuple(
        (_owned(option.model), option.bytes.resident) for option in options if option.bytes.resident
    )
    kept: Parts = (("engines", stays),) if stays else ()
    phases: list[tuple[str, Parts]] = [("at rest", (*rest, *kept))]
    for option in options:
        name = option.model.name
        if option.bytes.training:
            phases.append((f"while {name} trains", (*rest, *_training(planner, option), *kept)))
        if option.bytes.inference:
            read = (f"{name}'s forward pass", option.bytes.inference)
            phases.append((f"while {name} reads", (*rest, read, *kept)))
    for name, engine in engines.items():
        own = (
            ("the engine's weights", engine.weights),
            ("its cache", engine.cache),
            ("its passes", engine.working),
        )
        phases.append((f"while {name} generates", (*rest, *own)))
    when, parts = max(phases, key=lambda phase: _total(phase[1]))
    return PoolMemory(
        pool=pool,
        needed=_total(parts),
        usable=planner.nodes.memory,
        when=when,
        parts=tuple((what, nbytes) for what, nbytes in parts if nbytes),
        phases={moment: _total(own) for moment, own in phases},
        rooms={name: engine.room for name, engine in engines.items()},
    )


def _owned(model: PlannedModel) -> str:
    return f"{model.name}'s weights{' and optimizer' if model.trained else ''}"


def _total(parts: Parts) -> float:
    return sum(nbytes for _, nbytes in parts)


def _training(planner: PoolPlanner, option: Option) -> Parts:
    """Return the additional bytes of an update: the fullest moment of the largest call."""
    name = option.model.name
    moments = [
        planner.sizes.fullest(option.model, task.sequences, option.layout)
        for task in planner.workload.of(name, "train")
    ]
    fullest = max(moments, key=lambda moment: moment.nbytes)
    fetched: Parts = ()
    if option.bytes.fetched:
        fetched = ((_owned(option.model), option.bytes.fetched),)
    return (
        *fetched,
        ("gradients and gathered weights", fullest.held),
        ("activations and logits", fullest.alive),
    )


def _engine(
    planner: PoolPlanner, member: Member, resident: float, most: float, yields: bool
) -> EngineBytes:
    """Return the bytes of an engine, whose cache gets what the models leave."""
    model = member.model
    limits = model.limits
    sizes = planner.sizes
    assert member.engines is not None
    if member.option is not None:
        weights = sizes.engine_weights(model, member.option.layout, member.engines)
    else:
        shards = member.engines.pp * member.engines.tp
        weights = model.size.params * limits.weight_bytes / shards
    working = sizes.generating(model, member.engines)

    # At least one sequence, at most what the settings and the others leave.
    needed = sizes.cache_needed(model, member.engines)
    one = needed / max(1, sizes.decoded(model, member.engines))
    room = float(planner.cache(model, member.engines, resident, weights, most))
    cache = room if yields else planner.cache_limit(model, member.engines)
    if limits.grows:
        cache = min(cache, needed)
    left = planner.nodes.memory - resident - (most if model.keeps_engine else 0.0)
    return EngineBytes(
        weights,
        max(cache, one),
        working,
        EngineRoom(
            device=planner.nodes.device.memory_gb * GB,
            share=max(left - limits.graphs_gb * GB, 0.0),
            cache=max(room, one),
        ),
    )
