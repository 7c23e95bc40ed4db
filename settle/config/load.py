"""Reads a configuration as nested tables, and remembers where each value came from.

    file.toml         --load_toml------>  table \
    key=value         --parse_override->  table  > merge, in order -->  one table
    key=value         --parse_override->  table /                       and its Provenance

A table is a dict with string keys. A dotted key such as `actor.optimizer.lr` names a value in it;
values that are no tables are leaves.
"""

from __future__ import annotations

import copy
import datetime
import os
import re
import sys
import tomllib
from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import attrs

from hybridflow.core.errors import ConfigError

COMMAND_LINE = "command line"
"""The source of values given by overrides."""
DEFAULT = "default"
"""The source of values that are not given anywhere."""

_BY_NAME = (
    "algorithm",
    "runtime",
    "rollout",
    "placement",
    "placement.planner",
    "*.backend",
    "*.sync.transport",
)
SHORTHAND = frozenset(_BY_NAME) | frozenset(f"stages.*.{key}" for key in _BY_NAME)
"""Tables for which a plugin's name may be written: `rollout = "NAME"`."""

_PYTHON_FLOAT = re.compile(r"[+-]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][+-]?\d+)?")


# --- files ---


def load_toml(path: str | PathLike[str]) -> dict[str, Any]:
    """Return the tables of a TOML file.

    Raises ConfigError with the file, the line, and the text on it.
    """
    try:
        text = Path(path).read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}, line {line}: not UTF-8 text; save the file as UTF-8") from None
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}); give the path of a TOML file"
        ) from None

    # Editors on Windows write a byte-order mark, and lines that end in \r\n.
    text = text.removeprefix("\ufeff").replace("\r\n", "\n")
    try:
        return tomllib.loads(text)
    except ValueError as error:  # also an integer of more than 4300 digits
        raise ConfigError(_explain(str(path), text, str(error))) from None


def _explain(path: str, text: str, message: str) -> str:
    """Return tomllib's message, preceded by the file and followed by the line's text."""
    place = re.search(r" \(at line (\d+), column (\d+)\)$", message)
    if place is None:  # "at end of document"
        return f"{path}: {message}"

    line = int(place[1])
    column = int(place[2])
    shown = text.split("\n")[line - 1].strip()
    return f"{path}, line {line}, column {column}: {message[: place.start()]}; the line is: {shown}"


# --- overrides ---


def parse_override(text: str) -> tuple[str, Any]:
    """Return `a.b.c=value` as (dotted key, value). Raises ConfigError for a text of another form.

    The value is read as TOML, then as a Python float (`.5`, `1.e-4`), then taken as a string; a
    date stays a string.
    """
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals:
        raise ConfigError(
            f"override {text!r}: there is no '='; write key=value, "
            "for example actor.optimizer.lr=2e-4"
        )
    if key.startswith("-"):
        raise ConfigError(f"override {text!r}: write it without dashes, {key.lstrip('-')}={value}")
    if not key or not all(key.split(".")):
        raise ConfigError(
            f"override {text!r}: {key!r} is not a dotted key such as actor.optimizer.lr"
        )
    return key, parse_value(value.strip())


def parse_value(text: str) -> Any:
    """Return the value of an override: TOML, else a Python float, else a string."""
    try:
        table = tomllib.loads(f"value = {text}")
    except ValueError:
        return float(text) if _PYTHON_FLOAT.fullmatch(text) else text

    # A second key means that the text had several lines: it was no single value.
    value = table.pop("value")
    if table or isinstance(value, datetime.date | datetime.time):
        return text
    return value


def nest(path: str, value: Any) -> dict[str, Any]:
    """Return the tables that hold one value: `nest("a.b", 1)` is `{"a": {"b": 1}}`."""
    for key in reversed(path.split(".")):
        value = {key: value}
    return value


# --- layers ---


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with the values of `over` on top, as new tables.

    Tables merge key by key; anything else is replaced.
    """
    return _merge(copy.deepcopy(dict(base)), copy.deepcopy(dict(over)))


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def expand(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy in which `rollout = "NAME"`, and the like, is `rollout = {name = "NAME"}`."""
    patterns = [pattern.split(".") for pattern in SHORTHAND]

    def visit(value: Any, keys: list[str]) -> Any:
        if isinstance(value, str) and any(_matches(pattern, keys) for pattern in patterns):
            return {"name": value}
        if isinstance(value, Mapping):
            return {key: visit(inner, [*keys, key]) for key, inner in value.items()}
        return copy.deepcopy(value)

    return visit(data, [])


def _matches(pattern: list[str], keys: list[str]) -> bool:
    if len(pattern) != len(keys):
        return False
    return all(want in ("*", key) for want, key in zip(pattern, keys, strict=True))


def flatten(thing: Any, path: str = "") -> dict[str, Any]:
    """Return {dotted key: value} of the leaves of a table or an attrs instance, in order.

    An empty table is a leaf, and so is a list, except one with tables or attrs instances: those are
    numbered, `rewards.0.weight`.
    """
    if attrs.has(type(thing)):
        fields = [field for field in attrs.fields(type(thing)) if field.init]
        inner = {field.alias: getattr(thing, field.name) for field in fields}
    elif isinstance(thing, Mapping):
        inner = {str(key): value for key, value in thing.items()}
    elif isinstance(thing, list | tuple) and any(
        isinstance(item, Mapping) or attrs.has(type(item)) for item in thing
    ):
        inner = {str(index): value for index, value in enumerate(thing)}
    else:
        return {path: thing}

    # An empty table is a leaf, except at the top: there is no key to name it by.
    if not inner:
        return {path: {}} if path else {}

    leaves: dict[str, Any] = {}
    for key, value in inner.items():
        leaves |= flatten(value, f"{path}.{key}" if path else key)
    return leaves


# --- sources ---


class Provenance:
    """The source of each dotted key's value.

    A source is a text: "file examples/grpo.toml", "command line" or "default".
    """

    def __init__(self) -> None:
        self.sources: dict[str, str] = {}

    def record(self, data: Mapping[str, Any], source: str, path: str = "") -> None:
        """Note that the leaves of `data`, a table at `path`, come from `source`.

        It follows `merge`: the sources of what they replace are forgotten.
        """
        for key, value in data.items():
            inner = f"{path}.{key}" if path else key
            below = [known for known in self.sources if known.startswith(f"{inner}.")]

            # A table merges into an existing table, and replaces an existing leaf.
            if isinstance(value, Mapping) and (value or below):
                self.sources.pop(inner, None)
                self.record(value, source, inner)
                continue

            # A leaf replaces a table, with all that is below it.
            for known in below:
                del self.sources[known]
            self.sources |= dict.fromkeys(flatten(value, inner), source)

    def of(self, path: str) -> str:
        """Return the source of a key, or of the nearest value around it that was given."""
        keys = path.split(".")
        for length in range(len(keys), 0, -1):
            source = self.sources.get(".".join(keys[:length]))
            if source is not None:
                return source
        return DEFAULT


def import_from_beside(path: str | PathLike[str]) -> None:
    """Make the modules beside a file importable, as `import_from` does."""
    import_from(Path(path).parent)


def import_from(path: str | PathLike[str]) -> None:
    """Add a folder to sys.path, after installed packages and before the current folder."""
    folder = os.path.abspath(path)
    if folder in sys.path:
        return
    # The command line puts the current folder last.
    last = sys.path[-1:] == [os.getcwd()]
    sys.path.insert(len(sys.path) - last, folder)


def read_config(
    given: str | PathLike[str] | Mapping[str, Any] | None,
    overrides: Iterable[str] = (),
) -> tuple[dict[str, Any], Provenance]:
    """Return a config's tables with overrides on top, in order, and the source of every value.

    `given` is a file, or its tables. From then on modules beside the file can be imported. Raises
    ConfigError for a file that cannot be read, or with all overrides that cannot be parsed.
    """
    # The file first, then each override merged over the result so far.
    layers = []
    problems = []
    if isinstance(given, Mapping):
        layers.append((copy.deepcopy(dict(given)), "the given tables"))
    elif given is not None:
        layers.append((load_toml(given), f"file {given}"))
        import_from_beside(given)
    for text in overrides:
        try:
            layers.append((nest(*parse_override(text)), COMMAND_LINE))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)

    data: dict[str, Any] = {}
    provenance = Provenance()
    for layer, source in layers:
        layer = expand(layer)
        data = merge(data, layer)
        provenance.record(layer, source)
    return data, provenance
