"""A config file with settings put into it; what it says otherwise, its comments too, stays as it is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomlkit

from hybridflow.core.errors import ConfigError


def write_config(source: str | Path, target: str | Path, stages: Mapping[str | None, Mapping[str, Any]]) -> None:
    """`target` becomes `source` with the pools and the roles' layouts of each stage (None: of a file without stages) in place
    of its own. Raises ConfigError where `target` cannot be written."""
    document: Any = tomlkit.parse(Path(source).read_text())
    if None not in stages:
        document.pop("pools", None)  # each stage has its own; a pool that is left over would be started
    for stage, tables in stages.items():
        place = document if stage is None else document["stages"][stage]
        place["pools"] = _inline(tables["pools"])
        for role, table in tables.items():
            if role == "pools":
                continue
            if role not in place:
                place[role] = tomlkit.table()
            for key, value in table.items():
                place[role][key] = _inline(value) if isinstance(value, Mapping) else value
    try:
        Path(target).write_text(tomlkit.dumps(document))
    except OSError as error:
        raise ConfigError(f"--write {str(target)!r}: {error.strerror or error}") from error


def _inline(values: Mapping[str, Any]) -> Any:
    table = tomlkit.inline_table()
    table.update(values)
    return table
