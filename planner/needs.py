"""The memory of a placed pool's models on one device: of each phase, and the part left to engines.

With R, the bytes at rest of all models, and for each engine W of weights beside the trained ones,
C of cache and G of working memory, CUDA graphs included,

    role reads or trains       R + its additional bytes + W + C + graphs of engines that stay
    role generates             R + W + C + G + the same of other engines that stay

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
    """Working memory of its passes, while it generates."""
    room: EngineRoom

    def at_rest(self, model: PlannedModel) -> float:
        """Return the bytes that remain while models infer and train."""
        if model.keeps_engine:
            return self.weights + self.cache + model.limits.graphs_gb * GB
        return self.weights if model.limits.stays else 0.0


def pool_memory(
    planner: PoolPlanner, pool: str, members: Sequence[Member], yields: bool = True
) -> PoolMemory:
    """Return the fullest moment of a pool, and the memory that its models leave to engines.

    yields: whether engines' caches shrink where models leave less than the engines may use.
    """
    options = [member.option for member in members if member.option is not None]
    resident = sum(option.bytes.resident for option in options)
    most = max((option.most for option in options), default=0.0)

    # Engines that stay share what is left, each beside the weights of the others.
    placed = [member for member in members if member.engines is not None]
    weights = {member.model.name: _weights(planner, member) for member in placed}
    sharing = sum(member.model.keeps_engine for member in placed)
    engines = {}
    for member in placed:
        others = sum(
            weights[other.model.name]
            for other in placed
            if other is not member and (other.model.keeps_engine or other.model.limits.stays)
        )
        count = sharing if member.model.keeps_engine else 1
        own = weights[member.model.name]
        engines[member.model.name] = _engine(
            planner, member, own, resident + others, most, count, yields
        )
    at_rest = {
        member.model.name: engines[member.model.name].at_rest(member.model) for member in placed
    }
    stays = sum(at_rest.values())

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
        itself = (
            ("the engine's weights", engine.weights),
            ("its cache", engine.cache),
            ("its passes", engine.working),
        )
        others = stays - at_rest[name]
        beside: Parts = (("other engines", others),) if others else ()
        phases.append((f"while {name} generates", (*rest, *itself, *beside)))
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


def _weights(planner: PoolPlanner, member: Member) -> float:
    """Return the bytes of an engine's weights beside those of the model in its process."""
    assert member.engines is not None
    if member.option is not None:
        layout = member.option.layout
        return planner.sizes.engine_weights(member.model, layout, member.engines)
    shards = member.engines.pp * member.engines.tp
    return member.model.size.params * member.model.limits.weight_bytes / shards


def _engine(
    planner: PoolPlanner,
    member: Member,
    weights: float,
    resident: float,
    most: float,
    sharing: int,
    yields: bool,
) -> EngineBytes:
    """Return the bytes of one of `sharing` engines, whose caches divide what the models leave."""
    model = member.model
    limits = model.limits
    sizes = planner.sizes
    assert member.engines is not None

    # At least one sequence; at most the bytes that settings and other engines leave.
    needed = sizes.cache_needed(model, member.engines)
    one = needed / sizes.decoded(model, member.engines)
    free = float(planner.cache(model, member.engines, resident, weights, most))
    room = max(free / sharing, one)
    cache = room if yields else planner.cache_limit(model, member.engines)
    if limits.grows or limits.unlimited:
        cache = min(cache, needed)
    return EngineBytes(
        weights,
        max(cache, one),
        sizes.generating(model, member.engines),
        EngineRoom(device=planner.nodes.device.memory_gb * GB, share=weights + room, cache=room),
    )
