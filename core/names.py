"""Names: the nearest spelling, the object behind "module:Object", and whether a module is there, unimported."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Iterable
from importlib.machinery import ModuleSpec
from typing import Any


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """The candidate spelled most like `name`, or None when none is close."""
    by_lower = {candidate.lower(): candidate for candidate in candidates}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[close[0]] if close else None


def did_you_mean(name: str, candidates: Iterable[str], quote: str = "'") -> str:
    """ "; did you mean 'NAME'?", or nothing when no candidate is close."""
    close = nearest(name, candidates)
    return "" if close is None else f"; did you mean {quote}{close}{quote}?"


def is_path(text: str) -> bool:
    """Whether the text has the form "package.module:Object" or "package.module:Outer.Inner"."""
    module, colon, attribute = text.partition(":")
    parts = [*module.split("."), *attribute.split(".")]
    return bool(colon) and all(part.isidentifier() for part in parts)


def import_object(path: str) -> Any:
    """The object at "package.module:Object".

    Raises ValueError for another form, ImportError for an object that the module lacks, and whatever the module raises.
    """
    if not is_path(path):
        raise ValueError(f"{path!r} is not of the form 'package.module:Object'")
    module_name, _, attributes = path.partition(":")
    found: Any = importlib.import_module(module_name)
    for attribute in attributes.split("."):
        if not hasattr(found, attribute):
            public = (
                [name for name in vars(found) if not name.startswith("_")]
                if hasattr(found, "__dict__")
                else []
            )
            raise ImportError(
                f"{module_name} has no {attributes!r}{did_you_mean(attribute, public)}"
            )
        found = getattr(found, attribute)
    return found


def import_named(path: str) -> Any:
    """The module "package.module", or the object "package.module:Object". A module that exits is an ImportError."""
    try:
        return import_object(path) if ":" in path else importlib.import_module(path)
    except SystemExit as error:
        raise ImportError(f"{path} called sys.exit({error.code!r}) when imported") from error


def is_installed(module: str) -> bool:
    """Whether `import module` would find it. Nothing is imported, not even the parents of a dotted name.

    A folder without `__init__.py` is not enough: a `ray/` in the current folder is not Ray.
    """
    locations, spec = None, None
    parts = module.split(".")
    for depth in range(len(parts)):
        name = ".".join(parts[: depth + 1])
        if name in sys.modules:  # None there means that its import is forbidden
            spec = getattr(sys.modules[name], "__spec__", None)
        else:
            spec = find_spec(name, locations)
        if spec is None:
            return False
        locations = spec.submodule_search_locations
        if locations is None and depth + 1 < len(parts):
            return False
    return spec is not None and spec.origin is not None


def find_spec(name: str, locations: Any) -> ModuleSpec | None:
    """Where a part of a dotted name would be imported from, given where its parent lies (None: at the top).

    Unlike `importlib.util.find_spec` it does not answer from sys.modules, and imports no parent.
    """
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        spec: ModuleSpec | None = find(name, locations) if find else None
        if spec is not None:
            return spec
    return None


def reason(error: BaseException) -> str:
    """One line for an exception: its type and its message."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
