"""Checks settings that are passed on to a library unchanged.

Their names are compared with those of the installed version, without importing it.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import attrs

from hybridflow.core.names import did_you_mean


def package_folder(package: str) -> Path | None:
    """Return the folder of an installed package, or None if it is not installed."""
    # A module of a single file has no folder of its own.
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0])


def annotated_fields(
    files: Iterable[Path], classes: Sequence[str] | None = None
) -> tuple[str, ...]:
    """Return the annotated names in the bodies of these classes, read from the source.

    Without `classes` all classes count. Files that do not exist are skipped.
    """
    # The source is parsed, not imported: importing such a library takes seconds.
    names: dict[str, None] = {}  # a set that keeps its order
    for file in files:
        if not file.is_file():
            continue
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef) and (classes is None or node.name in classes):
                names |= dict.fromkeys(_annotated(node))
    return tuple(names)


def _annotated(node: ast.ClassDef) -> Iterator[str]:
    """Yield the annotated names in the body of a class."""
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            yield statement.target.id


def known_arguments(
    title: str,
    names: Callable[[], Sequence[str]],
    ours: frozenset[str],
    outlive: frozenset[str] = frozenset(),
) -> Callable[[Any, attrs.Attribute, dict[str, Any]], None]:
    """Return an attrs validator for a dict of arguments; it raises ValueError for a bad name.

    `title` is the library's name. `names` returns all its arguments, () if they are not known.
    `ours` are arguments that are set from the other settings, and must not be given; `outlive`
    those with which cached keys and values would outlive an update of the weights.
    """

    def check(_: Any, field: attrs.Attribute, value: dict[str, Any]) -> None:
        for name in value:
            if name in ours:
                raise ValueError(
                    f"{field.name}: {name} follows from the rest of the config; remove it"
                )
            if name in outlive and value[name]:
                raise ValueError(
                    f"{field.name}: {name} keeps keys and values of old weights beyond an update; "
                    "remove it"
                )
            # Asked only once there is an argument to compare.
            if (known := names()) and name not in known:
                raise ValueError(
                    f"{field.name}: the installed {title} has no argument {name!r}"
                    f"{did_you_mean(name, known)}"
                )

    return check
