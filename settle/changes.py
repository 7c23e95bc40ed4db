"""The settings that a resumed run may change, and those that it may not.

A run's folder holds its resolved settings. Those that decide what is learned must stay the same;
those of the devices, of speed and of reporting may change:

    run (but its seed), runtime, placement, pools, rollout, validation
    of a role: pool, layout, backend (but its adapters), generation, sync, optimizer, offload,
    micro_batch_tokens
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from hybridflow.core.errors import ConfigError, DamagedError
from hybridflow.core.job.job import Job
from hybridflow.core.job.sections import RoleSection
from hybridflow.core.values.files import MARK, SETTINGS
from hybridflow.core.values.sealed import read_sealed
from hybridflow.settle.schema import SECTIONS

FREE_SECTIONS = ("run", "runtime", "placement", "pools", "rollout", "validation")
"""Tables whose settings may change."""
FREE_OF_ROLES = (
    "pool",
    "layout",
    "backend",
    "generation",
    "sync",
    "optimizer",
    "offload",
    "micro_batch_tokens",
)
"""Keys of a role's table that may change."""
UNSET = object()


@attrs.frozen
class Change:
    """A setting whose value differs from that in the run's folder."""

    key: str
    before: Any
    now: Any

    @property
    def allowed(self) -> bool:
        """Return whether a resumed run may have this change."""
        section, *inner = self.key.split(".")
        if section in SECTIONS:
            return section in FREE_SECTIONS and self.key != "run.seed"
        # A role's table; adapters are part of the model.
        return inner[:1] != [] and inner[0] in FREE_OF_ROLES and inner[:2] != ["backend", "lora"]

    def __str__(self) -> str:
        return f"{self.key} {_written(self.before)} -> {_written(self.now)}"


def settings(job: Job) -> dict[str, Any]:
    """Return a job's resolved settings by dotted key, as JSON has them."""
    leaves: dict[str, Any] = {}
    for key, thing in _sections(job):
        leaves.update(_leaves(key, thing))
    return json.loads(json.dumps(leaves, default=str))


def changes(job: Job, folder: Path | None = None) -> list[Change] | None:
    """Compare a job's settings with those in a run's folder; None where the folder has none.

    folder: None stands for the job's own. A setting that only one version of hybridflow has is not
    compared. Raises ConfigError where the folder's file of settings is damaged.
    """
    mark = (folder or job.folder) / MARK
    try:
        before = read_sealed(mark).get(SETTINGS) if mark.is_file() else None
    except DamagedError as error:
        raise ConfigError(
            f"{error}. Put back a copy, or remove it: nothing compares the run's settings with "
            "the present ones then"
        ) from error
    if before is None:
        return None
    now = settings(job)
    found: list[Change] = []
    for key in now.keys() | before.keys():
        values = (_value(before, key), _value(now, key))
        if UNSET not in values:
            found += _differences(key, *values)
    return found


def _value(leaves: Mapping[str, Any], key: str) -> Any:
    """Return the leaf at a key, or the table of leaves below it; UNSET where there is neither."""
    if key in leaves:
        return leaves[key]
    prefix = f"{key}."
    below = {inner: value for inner, value in leaves.items() if inner.startswith(prefix)}
    return {inner.removeprefix(prefix): value for inner, value in below.items()} or UNSET


def check_changes(job: Job) -> list[Change] | None:
    """Return the changed settings of a resumed run, in the order of their keys; None as `changes`.

    Raises ConfigError with all changes that are not allowed.
    """
    found = changes(job)
    if found is None:
        return None
    every = sorted(found, key=lambda change: change.key)
    refused = [change for change in every if not change.allowed]
    if refused:
        prefix = f"stage {job.stage}: " if job.stage else ""
        advice = (
            f"a run that goes on keeps what decides the result; the one in {job.folder} began "
            "with the first value. Set it back, give this run a name of its own (run.name=...), "
            "or replace the earlier one (--overwrite)"
        )
        raise ConfigError([f"{prefix}--resume: {change}: {advice}" for change in refused])
    return every


def _sections(job: Job) -> Iterator[tuple[str, Any]]:
    """Yield the dotted key of each section and its settings."""
    # Sections of every job
    yield "run", job.run
    yield from _plugin("runtime", job.runtime, job.runtime_config)
    yield "placement", job.placement
    for name, pool in job.pools.items():
        yield f"pools.{name}", [*pool.devices_per_node, *([pool.device] if pool.device else [])]
    yield from _plugin("algorithm", job.algorithm_name, job.algorithm.config)

    # Data and text
    yield "data", job.data
    for name, config in job.more_data.items():
        yield name, config
    yield "tokenizer", job.tokenizer
    yield "sampling", job.sampling
    yield "environment", job.environment
    yield "validation", job.validation

    # The roles
    for name, placed in job.models.items():
        spec = placed.spec
        hidden = {"backend"} if placed.role.trained else {"backend", "optimizer"}
        for field in attrs.fields(RoleSection):
            if field.name not in hidden:
                yield f"{name}.{field.name}", getattr(placed.section, field.name)
        yield from _plugin(f"{name}.backend", spec.backend, spec.backend_config)
        if spec.engine is not None:
            yield from _plugin("rollout", spec.engine, spec.engine_config)
    for name, scorer in job.scorers.items():
        yield name, scorer.section


def _plugin(key: str, name: str, config: Any) -> Iterator[tuple[str, Any]]:
    yield f"{key}.name", name
    if config is not None:
        yield key, config


def _leaves(key: str, thing: Any) -> Iterator[tuple[str, Any]]:
    """Yield the fields of a config instance and of those inside it; any other value is one leaf."""
    if not attrs.has(type(thing)):
        yield key, thing
        return
    for field in attrs.fields(type(thing)):
        if field.init:
            yield from _leaves(f"{key}.{field.alias}", getattr(thing, field.name))


def _differences(key: str, before: Any, now: Any) -> Iterator[Change]:
    """Yield the differences of two values; for tables, one for each key that differs."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for name in {**before, **now}:
            inner = (before.get(name, UNSET), now.get(name, UNSET))
            yield from _differences(f"{key}.{name}", *inner)
    elif before != now:
        yield Change(key, before, now)


def _written(value: Any) -> str:
    if value is UNSET or value is None:
        return "(not set)"
    # JSON writes texts and booleans as TOML does.
    return json.dumps(value, ensure_ascii=False)
