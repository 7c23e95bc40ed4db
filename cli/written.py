"""Puts settings into a config file; everything else in it, comments too, stays as it is.

The wanted tables are computed first, then the text is edited until it parses to them.
"""

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
from hybridflow.settle.places import forget_places, replace_places


def write_config(
    source: str | Path,
    target: str | Path,
    stages: Mapping[str | None, Mapping[str, Any]],
    cluster: str | None,
) -> bool:
    """Write `source` to `target` with other pools and layouts; return whether comments were kept.

    `stages` has the tables of each run stage (None: of a file without stages); they replace the
    file's own. The setting `placement` becomes "given", and its cluster `cluster` (None: as in the
    file). Raises ConfigError where `target` cannot be written.
    """
    # The line ends of the file stay as they are.
    with open(source, newline="") as file:
        text = file.read()
    wanted = tomllib.loads(text)
    _settle(wanted, stages, cluster)
    edited = _edited(text.replace("\r\n", "\n"), wanted)

    newline = "\r\n" if "\r\n" in text else "\n"
    # Where the text cannot be edited, the tables are written anew.
    try:
        content = tomlkit.dumps(wanted) if edited is None else edited
        Path(target).write_text(content, newline=newline)
    except OSError as error:
        raise ConfigError(f"--write {str(target)!r}: {error.strerror or error}") from error
    return edited is not None


def _settle(
    tables: dict[str, Any], stages: Mapping[str | None, Mapping[str, Any]], cluster: str | None
) -> None:
    """Put the pools and layouts of `stages` into a config's tables."""
    # Tables that may have a placement: the common one, and those of run stages.
    for table in (tables, *tables.get("stages", {}).values()):
        if "placement" not in table:
            continue
        own = table["placement"] if isinstance(table["placement"], Mapping) else {}
        named = {"cluster": cluster} if cluster else {}
        table["placement"] = {**own, **named, "name": "given"}

    # Each run stage has its own pools; a common pool that none uses would be started too.
    if None not in stages:
        forget_places(tables)
    for stage, places in stages.items():
        table = tables if stage is None else tables["stages"][stage]
        replace_places(table, deepcopy(dict(places)))


def _edited(text: str, wanted: Mapping[str, Any]) -> str | None:
    """Return the text, edited so that it parses to `wanted`.

    None where tomlkit cannot do that, as with some dotted keys.
    """
    # Read the result again: tomlkit does not always write what was meant.
    document = tomlkit.parse(text)
    try:
        _become(document, wanted)
        edited = tomlkit.dumps(document)
        return edited if tomllib.loads(edited) == wanted else None
    except (TOMLKitError, tomllib.TOMLDecodeError, LookupError):
        return None


def _become(table: Any, wanted: Mapping[str, Any], depth: int = 0) -> None:
    """Change a table of tomlkit until it equals `wanted`."""
    for key in [key for key in table if key not in wanted]:
        _remove(table, key)

    # Comments at the end of a table belong to what comes next: they stay behind new keys.
    body = _body(table)
    tail: list[Any] = []
    while depth and body and body[-1][0] is None:
        tail.insert(0, body.pop())

    for key, value in wanted.items():
        current = table.get(key)
        if isinstance(current, Mapping) and isinstance(value, Mapping):
            _become(current, value, depth + 1)
        elif key not in table or current != value:
            table[key] = _inline(value) if depth or key == "placement" else value
    body.extend(tail)


def _remove(table: Any, key: str) -> None:
    """Remove a key with the comments in its table, but not those at the end of it.

    The latter belong to what comes next, and move to the key's position.
    """
    body = _body(table)
    inner = _body(table[key])
    keys = [item is not None and item.key == key for item, _ in body]
    position = keys.index(True) if True in keys else None

    # Take the comments at the end, the last one first.
    tail = ""
    while inner and inner[-1][0] is None:
        tail = inner.pop()[1].as_string() + tail

    table.pop(key)
    if (
        tail and position is not None and body[position][0] is None
    ):  # tomlkit keeps the position, empty
        body[position] = (None, Whitespace(tail))


def _body(table: Any) -> list[Any]:
    """Return the items of a table of tomlkit, in order.

    They are pairs of a key and a value; comments and empty lines have the key None.
    """
    container = table if isinstance(table, Container) else getattr(table, "value", None)
    return getattr(container, "body", [])


def _inline(value: Any) -> Any:
    """Return a mapping as an inline table, nested ones included; any other value as it is."""
    if not isinstance(value, Mapping):
        return value
    table = tomlkit.inline_table()
    for key, inner in value.items():
        table[key] = _inline(inner)
    return table
