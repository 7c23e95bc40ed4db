"""Names: similar spellings, objects at "module:Object", and modules that may be missing."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Iterable
from importlib.machinery import ModuleSpec
from typing import Any


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate with the spelling closest to `name`, or None where none is close.

    Upper and lower case count as the same.
    """
    by_lower = {candidate.lower(): candidate for candidate in candidates}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[close[0]] if close else None


def did_you_mean(name: str, candidates: Iterable[str], quote: str = "'") -> str:
    """Return the end of a message, "; did you mean 'NAME'?", or "" where no candidate is close."""
    close = nearest(name, candidates)
    return "" if close is None else f"; did you mean {quote}{close}{quote}?"


def is_path(text: str) -> bool:
    """Return whether the text is like "package.module:Object" or "package.module:Outer.Inner"."""
    module, colon, attribute = text.partition(":")
    parts = [*module.split("."), *attribute.split(".")]
    return bool(colon) and all(part.isidentifier() for part in parts)


def import_object(path: str) -> Any:
    """Import the object at "package.module:Object".

    Raises ValueError for another form, ImportError for an object that the module lacks, and any
    error of the module's own import.
    """
    if not is_path(path):
        raise ValueError(f"{path!r} is not of the form 'package.module:Object'")
    module_name, _, attributes = path.partition(":")
    value: Any = importlib.import_module(module_name)

    for attribute in attributes.split("."):
        if not hasattr(value, attribute):
            public = [name for name in getattr(value, "__dict__", ()) if not name.startswith("_")]
            meant = did_you_mean(attribute, public)
            raise ImportError(f"{module_name} has no {attributes!r}{meant}")
        value = getattr(value, attribute)
    return value


def import_named(path: str) -> Any:
    """Import the module "package.module" or the object "package.module:Object".

    Raises as `import_object` does, and ImportError for a module that calls sys.exit.
    """
    try:
        return import_object(path) if ":" in path else importlib.import_module(path)
    except SystemExit as error:
        raise ImportError(f"{path} called sys.exit({error.code!r}) when imported") from error


def is_installed(module: str) -> bool:
    """Return whether `import module` would find a module.

    Nothing is imported, not even the parents of a dotted name. A folder without `__init__.py` is
    not enough: a `ray/` in the current folder is not Ray.
    """
    locations = None
    spec = None
    parts = module.split(".")
    for depth in range(len(parts)):
        name = ".".join(parts[: depth + 1])
        if name in sys.modules:  # None there means that its import is forbidden
            spec = getattr(sys.modules[name], "__spec__", None)
        else:
            spec = find_spec(name, locations)
        if spec is None:
            return False

        # Where to look for the next part; a plain module has no parts.
        locations = spec.submodule_search_locations
        if locations is None and depth + 1 < len(parts):
            return False

    # The spec of a folder without __init__.py has no origin.
    return spec is not None and spec.origin is not None


def find_spec(name: str, locations: Any) -> ModuleSpec | None:
    """Find where a part of a dotted name would be imported from.

    `locations` are the parent's folders; None for a name without a parent. Unlike
    `importlib.util.find_spec` it does not answer from sys.modules, and imports no parent.
    """
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        spec: ModuleSpec | None = find(name, locations) if find else None
        if spec is not None:
            return spec
    return None


def reason(error: BaseException) -> str:
    """Describe an exception in one line: its type and its message."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
