"""Capabilities of plugins, one class per kind of plugin.

`hybridflow plugins` lists them, checks before a run use them, and the conformance kit tests them.
Nothing here imports torch: descriptors are made whenever plugins are listed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import attrs

DEVICES = frozenset({"cpu", "cuda"})
"""The device types that the core knows."""


def _frozen(names: Iterable[str]) -> frozenset[str]:
    # frozenset would split a string into letters, which is never meant.
    if isinstance(names, str):
        raise TypeError(f"expected a set of names, got the string {names!r}; write {{{names!r}}}")
    return frozenset(names)


def _names(*default: str) -> frozenset[str]:
    """Make a field for a set of names."""
    field: frozenset[str] = attrs.field(default=frozenset(default), converter=_frozen)
    return field


@attrs.frozen
class NoCapabilities:
    """Capabilities of plugins of all other kinds: there are none."""


@attrs.frozen(kw_only=True)
class TrainingCapabilities:
    """The jobs that a training backend supports, and the columns that its models read."""

    # Which jobs it can take
    axes: frozenset[str] = _names("dp")
    """Parallel axes that it supports, of dp, tp, pp, cp and ep."""
    models: frozenset[str] = _names("policy", "value", "score")
    """Kinds of model that it trains."""
    devices: frozenset[str] = _names(*DEVICES)
    """Device types on which it runs."""

    extras: frozenset[str] = _names()
    """Columns beyond those of docs/batch.md that its models read, passed in MicroBatch.extras."""


@attrs.frozen(kw_only=True)
class EngineCapabilities:
    """The jobs that a rollout engine supports: where it runs, how it gets requests and weights."""

    # Where it can run
    tp: bool = False
    """Whether a replica may have several tensor-parallel ranks."""
    pp: bool = False
    """Whether a replica may have several pipeline stages."""
    devices: frozenset[str] = _names(*DEVICES)
    """Device types on which it runs."""

    # Weights
    grouping: Literal["any", "consecutive"] = "any"
    """Which ranks can form a replica: consecutive ones only, or ranks of any grouping."""
    views: bool = True
    """Whether `proof` returns checksums of stored weights, which every sync compares."""

    # Processes and columns
    process: Literal["worker", "own", "either"] = "worker"
    """Where it runs: in the worker's process, in one of its own, or as set in its config."""
    extras: frozenset[str] = _names()
    """Columns beyond those of docs/batch.md that it reads, passed in Request.extras."""


@attrs.frozen(kw_only=True)
class RuntimeCapabilities:
    """How a runtime starts workers: in processes, on several nodes, and how many."""

    # How workers run
    processes: bool = True
    """Whether workers have processes of their own."""
    cluster: bool = False
    """Whether it can reach several nodes."""
    max_ranks: int | None = None
    """Largest number of ranks of a pool; None: any number."""
    replaces: bool = False
    """Whether it can start a process in the place of one that has ended (Runtime.replace)."""


@attrs.frozen(kw_only=True)
class TransportCapabilities:
    """Whether `transport = "auto"` may choose a weight transport."""

    order: int | None = None
    """Its order among those that `transport = "auto"` tries, the lowest first; None: it is used
    only when it is named."""


@attrs.frozen(kw_only=True)
class CommandCapabilities:
    """The help of a command that `hybridflow --help` prints without importing it."""

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
"""Kind of plugin -> the class of its capabilities. Other kinds have NoCapabilities."""


def capabilities_class(kind: str) -> type:
    """Return the class of the capabilities of a kind of plugin."""
    return BY_KIND.get(kind, NoCapabilities)
