"""Placement in the tables of a configuration: the pools, and the pools and layouts of roles.

A planner's settings replace those of the configuration.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from copy import deepcopy
from typing import Any

from hybridflow.settle.schema import SECTIONS


def says_auto(tables: Mapping[str, Any]) -> bool:
    """Return whether the tables leave the placement to a planner."""
    section = tables.get("placement")
    return isinstance(section, Mapping) and section.get("name") == "auto"


def replace_places(tables: Any, settled: Mapping[str, Any]) -> None:
    """Put a plan's settings into the tables, which are changed.

    Pools and sizes are replaced. The other settings of an engine or a layout (grouping, keep,
    order) stay.
    """
    forget_places(tables)
    tables["pools"] = deepcopy(settled["pools"]) | tables.get("pools", {})

    # All keys but the pools are roles, each with the settings that the plan chose.
    for role, settings in settled.items():
        if role == "pools":
            continue
        if not isinstance(tables.get(role), MutableMapping):
            tables[role] = {}
        for key, value in settings.items():
            present = tables[role].get(key)
            # Layouts are merged, so that their other settings stay.
            if isinstance(value, dict) and isinstance(present, MutableMapping):
                present.update(value)
            else:
                tables[role][key] = deepcopy(value)


def forget_places(tables: Any) -> None:
    """Drop [pools], and the pool and the sizes of every role's table; the tables are changed.

    Pools on CPUs stay, and reward functions in them: a planner places models alone.
    """
    pools = tables.pop("pools", {})
    kept = {
        name: pool
        for name, pool in pools.items()
        if isinstance(pool, Mapping) and pool.get("device") == "cpu"
    }
    if kept:
        tables["pools"] = kept
    places = {"layout": ("pp", "tp", "dp", "cp", "ep"), "generation": ("pp", "tp", "pool")}

    for role, table in tables.items():
        # A table that is no section is a role's.
        if role in SECTIONS or not isinstance(table, MutableMapping):
            continue
        if table.get("pool") not in [*kept]:  # it may be of any type
            table.pop("pool", None)
        for key, sizes in places.items():
            if isinstance(inner := table.get(key), MutableMapping):
                for size in sizes:
                    inner.pop(size, None)
                if not inner:
                    table.pop(key)
