"""Where models go, as tables of a config: pools, and the sizes in the roles' tables. What a planner finds is put there."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from copy import deepcopy
from typing import Any

from hybridflow.core.job.schema import SECTIONS


def says_auto(tables: Mapping[str, Any]) -> bool:
    """Whether the tables leave the placement to a planner."""
    section = tables.get("placement")
    return isinstance(section, Mapping) and section.get("name") == "auto"


def replace_places(tables: Any, settled: Mapping[str, Any]) -> None:
    """Put the settings of a plan into tables of a config, in place: sizes and pools are replaced; how an engine or a layout
    is otherwise (grouping, keep, order) stays."""
    forget_places(tables)
    tables["pools"] = deepcopy(settled["pools"])
    for role, own in settled.items():
        if role == "pools":
            continue
        if not isinstance(tables.get(role), MutableMapping):
            tables[role] = {}
        for key, value in own.items():
            there = tables[role].get(key)
            if isinstance(value, dict) and isinstance(there, MutableMapping):
                there.update(value)
            else:
                tables[role][key] = deepcopy(value)


def forget_places(tables: Any) -> None:
    """Drop the pools, and of every table that is no section (so a role's) its pool and sizes, in place."""
    tables.pop("pools", None)
    for role, table in tables.items():
        if role in SECTIONS or not isinstance(table, MutableMapping):
            continue
        table.pop("pool", None)
        for key, sizes in (
            ("layout", ("pp", "tp", "dp", "cp", "ep")),
            ("generation", ("pp", "tp", "pool")),
        ):
            if isinstance(inner := table.get(key), MutableMapping):
                for size in sizes:
                    inner.pop(size, None)
                if not inner:
                    table.pop(key)
