"""A config file with settings put into it; what it says otherwise, its comments too, stays as it is."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.container import Container
from tomlkit.exceptions import TOMLKitError
from tomlkit.items import Whitespace

from hybridflow.core.errors import ConfigError
from hybridflow.core.job.places import forget_places, replace_places


def write_config(
    source: str | Path,
    target: str | Path,
    stages: Mapping[str | None, Mapping[str, Any]],
    cluster: str | None,
) -> bool:
    """`target` becomes `source` with the pools and the roles' layouts of each stage (None: of a file without stages) in place
    of its own; a `placement` then says that they are given, for `cluster` (None: for its own).
    False where comments could not be kept. Raises ConfigError where `target` cannot be written."""
    with open(source, newline="") as file:
        text = file.read()
    wanted = tomllib.loads(text)
    _settle(wanted, stages, cluster)
    written = _edited(text.replace("\r\n", "\n"), wanted)
    try:
        newline = "\r\n" if "\r\n" in text else "\n"
        Path(target).write_text(
            tomlkit.dumps(wanted) if written is None else written, newline=newline
        )
    except OSError as error:
        raise ConfigError(f"--write {str(target)!r}: {error.strerror or error}") from error
    return written is not None


def _settle(
    tables: dict[str, Any], stages: Mapping[str | None, Mapping[str, Any]], cluster: str | None
) -> None:
    for table in (tables, *tables.get("stages", {}).values()):
        if "placement" in table:
            own = table["placement"] if isinstance(table["placement"], Mapping) else {}
            named = {"cluster": cluster} if cluster else {}
            table["placement"] = {**own, **named, "name": "given"}
    if None not in stages:
        forget_places(tables)  # each stage has its own; a pool that is left over would be started
    for stage, settled in stages.items():
        replace_places(
            tables if stage is None else tables["stages"][stage], deepcopy(dict(settled))
        )


def _edited(text: str, wanted: Mapping[str, Any]) -> str | None:
    """The text changed where it must be to say `wanted`; None where tomlkit cannot (some dotted keys)."""
    document = tomlkit.parse(text)
    try:
        _become(document, wanted)
        written = tomlkit.dumps(document)
        return written if tomllib.loads(written) == wanted else None
    except (TOMLKitError, tomllib.TOMLDecodeError, LookupError):
        return None


def _become(table: Any, wanted: Mapping[str, Any], depth: int = 0) -> None:
    for key in [key for key in table if key not in wanted]:
        _remove(table, key)
    body = _body(table)
    tail: list[Any] = []
    while depth and body and body[-1][0] is None:  # belongs to what comes next
        tail.insert(0, body.pop())
    for key, value in wanted.items():
        there = table.get(key)
        if isinstance(there, Mapping) and isinstance(value, Mapping):
            _become(there, value, depth + 1)
        elif key not in table or there != value:
            table[key] = _inline(value) if depth or key == "placement" else value
    body.extend(tail)


def _remove(table: Any, key: str) -> None:
    """And the comments in it, without those at its end: they belong to what comes next."""
    body, inner, tail = _body(table), _body(table[key]), ""
    at = next((i for i, (k, _) in enumerate(body) if k is not None and k.key == key), None)
    while inner and inner[-1][0] is None:
        tail = inner.pop()[1].as_string() + tail
    table.pop(key)
    if tail and at is not None and body[at][0] is None:  # its place is kept, empty
        body[at] = (None, Whitespace(tail))


def _body(table: Any) -> list[Any]:
    """What tomlkit keeps of a table, in order: (key, value), and comments and empty lines without key."""
    container = table if isinstance(table, Container) else getattr(table, "value", None)
    return getattr(container, "body", [])


def _inline(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    table = tomlkit.inline_table()
    for key, inner in value.items():
        table[key] = _inline(inner)
    return table
