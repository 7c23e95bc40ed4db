"""Reads the entry points of installed packages, so that a broken package hides no other."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterator

import attrs

from hybridflow.core.plugins.hookspecs import PROJECT


@attrs.frozen
class FoundPlugin:
    """One entry point of the group `hybridflow`."""

    package: str
    """Name of the distribution, "unknown" where its metadata has none."""
    version: str
    """Version of the distribution, "" where its metadata has none."""
    name: str
    """Left side of the entry point: "kind.name", or the name of a module."""
    value: str
    """Right side of the entry point: "module:Object", or "module"."""


def entry_points() -> Iterator[FoundPlugin | tuple[str, str, Exception]]:
    """Yield every entry point of our group, sorted by name within its package.

    A package whose entry points cannot be read yields (package, version, error) instead:
    `importlib.metadata.entry_points` reads all packages at once, and one malformed file would fail
    them all. Of two distributions with one name the first on sys.path counts, as for imports.
    """
    seen: set[str] = set()  # names of distributions
    for distribution in importlib.metadata.distributions():
        if not _may_be_ours(distribution):
            continue
        package = distribution.metadata["Name"] or "unknown"
        version = distribution.metadata["Version"] or ""

        # Names are compared as packaging does: "My_Package" is "my-package".
        key = re.sub(r"[-_.]+", "-", package).lower()
        if key in seen:
            continue
        seen.add(key)

        # One malformed line makes the whole file unreadable.
        try:
            points = [point for point in distribution.entry_points if point.group == PROJECT]
        except Exception as error:
            yield package, version, error
            continue

        for point in sorted(points, key=lambda point: point.name):
            yield FoundPlugin(package, version, point.name, point.value)


def _may_be_ours(distribution: importlib.metadata.Distribution) -> bool:
    """Return whether a distribution has entry points of our group.

    It is also true where the file cannot be decoded, so that the caller reports it.
    """
    try:
        text = distribution.read_text("entry_points.txt") or ""
    except UnicodeDecodeError:
        return True
    return re.search(rf"^\s*\[\s*{PROJECT}\s*\]", text, re.MULTILINE) is not None
