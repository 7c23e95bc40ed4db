"""Settings that go to a library as they are, checked by the names that its installed version has, without importing it."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import attrs

from hybridflow.core.names import did_you_mean


def package_folder(package: str) -> Path | None:
    """Where an installed package lies; None where there is none."""
    spec = find_spec(package)
    return (
        Path(spec.submodule_search_locations[0])
        if spec and spec.submodule_search_locations
        else None
    )


def annotated_fields(
    files: Iterable[Path], classes: Sequence[str] | None = None
) -> tuple[str, ...]:
    """The annotated names in the bodies of these classes (of all, if none are named), read from the source."""
    found: dict[str, None] = {}
    for file in files:
        for node in ast.parse(file.read_text()).body if file.is_file() else ():
            if isinstance(node, ast.ClassDef) and (classes is None or node.name in classes):
                targets = (n.target for n in node.body if isinstance(n, ast.AnnAssign))
                found |= dict.fromkeys(t.id for t in targets if isinstance(t, ast.Name))
    return tuple(found)


def known_arguments(
    title: str, names: Callable[[], Sequence[str]], ours: frozenset[str]
) -> Callable[[Any, attrs.Attribute, dict[str, Any]], None]:
    """A validator. `ours`: names that follow from the rest of the config; `names`: all there are, () if it is not known."""

    def check(_: Any, field: attrs.Attribute, value: dict[str, Any]) -> None:
        for name in value:
            if name in ours:
                raise ValueError(
                    f"{field.name}: {name} follows from the rest of the config; remove it"
                )
            if (there := names()) and name not in there:
                raise ValueError(
                    f"{field.name}: the installed {title} has no argument {name!r}{did_you_mean(name, there)}"
                )

    return check
