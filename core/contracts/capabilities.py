"""What a plugin can do, by its kind: for `hybridflow plugins`, for checks before a run, and for the conformance kit.

Nothing here imports torch: descriptors are made whenever plugins are listed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import attrs

DEVICES = frozenset({"cpu", "cuda"})


def _frozen(names: Iterable[str]) -> frozenset[str]:
    if isinstance(names, str):
        raise TypeError(f"expected a set of names, got the string {names!r}; write {{{names!r}}}")
    return frozenset(names)


def _names(*default: str) -> frozenset[str]:
    """A field for a set of names."""
    field: frozenset[str] = attrs.field(default=frozenset(default), converter=_frozen)
    return field


@attrs.frozen
class NoCapabilities:
    """Of the kinds of which nothing needs to be known before they are used."""


@attrs.frozen(kw_only=True)
class TrainingCapabilities:
    """Of a training backend."""

    axes: frozenset[str] = _names("dp")
    """Parallel axes that it has: dp, tp, pp, cp, ep."""
    models: frozenset[str] = _names("policy", "value", "score")
    """Kinds of model that it trains."""
    precisions: frozenset[str] = _names("fp32")
    """What its setting `precision` may be."""
    devices: frozenset[str] = _names(*DEVICES)
    """Device types on which it runs."""
    adapters: bool = False
    """Whether it trains low-rank adapters (LoRA)."""
    offload: bool = False
    """Whether `offload` leaves nothing on the device."""
    extras: frozenset[str] = _names()
    """Columns beyond those of docs/batch.md that its models read; they come in MicroBatch.extras."""


@attrs.frozen(kw_only=True)
class EngineCapabilities:
    """Of a rollout engine."""

    tp: bool = False
    """Whether a replica may have several tensor-parallel ranks."""
    pp: bool = False
    """Whether a replica may have several pipeline stages."""
    devices: frozenset[str] = _names(*DEVICES)
    """Device types on which it runs."""
    abort: bool = False
    """Whether running requests can be ended early."""
    sleeps_on: frozenset[str] = _names()
    """Device types on which `sleep` gives memory back."""
    continuous: bool = False
    """Whether requests may come while others run."""
    weights_in_flight: bool = False
    """Whether weights may change while sequences run."""
    adapters: bool = False
    """Whether `begin_update` takes an adapter instead of whole weights."""
    traced_layout: bool = False
    """Whether its layout follows from its own weight loader."""
    grouping: Literal["any", "consecutive"] = "any"
    """Which ranks can form a replica."""
    views: bool = True
    """Whether `read` gives stored weights, which sync.verify compares."""
    process: Literal["worker", "own", "either"] = "worker"
    """Where it runs: in the worker's process, in one of its own, or as its settings say."""
    extras: frozenset[str] = _names()
    """Columns beyond those of docs/batch.md that it reads; they come in Request.extras."""


@attrs.frozen(kw_only=True)
class RuntimeCapabilities:
    """Of a runtime."""

    processes: bool = True
    """Whether workers have processes of their own."""
    cluster: bool = False
    """Whether it can reach several nodes."""
    debugger: bool = False
    """Whether breakpoints in workers work."""
    max_ranks: int | None = None
    """Ranks of a pool at most; None: any number."""


@attrs.frozen(kw_only=True)
class TransportCapabilities:
    """Of a weight transport."""

    order: int | None = None
    """Its place among those that `transport = "auto"` tries, the lowest first; None: only when it is named."""


@attrs.frozen(kw_only=True)
class CommandCapabilities:
    """Of a command."""

    summary: str = ""
    """One sentence for `hybridflow --help`."""


Capabilities = (
    NoCapabilities
    | TrainingCapabilities
    | EngineCapabilities
    | RuntimeCapabilities
    | TransportCapabilities
    | CommandCapabilities
)

BY_KIND: dict[str, type] = {
    "training_backend": TrainingCapabilities,
    "rollout_engine": EngineCapabilities,
    "runtime": RuntimeCapabilities,
    "transport": TransportCapabilities,
    "command": CommandCapabilities,
}
"""Kind of plugin -> the class of its capabilities; of the others NoCapabilities."""


def capabilities_class(kind: str) -> type:
    """The class of the capabilities of a kind."""
    return BY_KIND.get(kind, NoCapabilities)
