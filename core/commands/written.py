"""A config file with settings put into it; what it says otherwise, its comments too, stays as it is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomlkit

from hybridflow.core.errors import ConfigError
from hybridflow.core.mapping.job import forget_places, replace_places


def write_config(
    source: str | Path, target: str | Path, stages: Mapping[str | None, Mapping[str, Any]], cluster: str
) -> None:
    """`target` becomes `source` with the pools and the roles' layouts of each stage (None: of a file without stages) in place
    of its own; a `placement` then says that they are given, for `cluster`. Raises ConfigError where `target` cannot be
    written."""
    document: Any = tomlkit.parse(Path(source).read_text())
    for table in (document, *document.get("stages", {}).values()):
        if "placement" in table:
            table["placement"] = _one({"name": "given", "cluster": cluster})
    if None not in stages:
        forget_places(document)  # each stage has its own; a pool that is left over would be started
    for stage, tables in stages.items():
        place = document if stage is None else document["stages"][stage]
        replace_places(place, _inline(tables))
    try:
        Path(target).write_text(tomlkit.dumps(document))
    except OSError as error:
        raise ConfigError(f"--write {str(target)!r}: {error.strerror or error}") from error


def _inline(values: Mapping[str, Any]) -> dict[str, Any]:
    """The tables inside each table as inline ones."""
    return {
        key: {k: _one(v) for k, v in table.items()} if key != "pools" else _one(table) for key, table in values.items()
    }


def _one(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    table = tomlkit.inline_table()
    table.update(value)
    return table
