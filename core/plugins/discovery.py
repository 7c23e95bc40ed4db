"""The entry points of installed packages, one broken package at a time."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterator

import attrs

from hybridflow.core.plugins.hookspecs import PROJECT


@attrs.frozen
class Found:
    """One entry point of the group `hybridflow`."""

    package: str
    version: str
    name: str
    value: str


def entry_points() -> Iterator[Found | tuple[str, str, Exception]]:
    """Every entry point of our group; (package, version, error) for a package whose entry points cannot be read.

    `importlib.metadata.entry_points` reads all packages at once and raises for all when one file is malformed. Of two
    distributions with one name the first on sys.path counts, as it does for imports.
    """
    seen: set[str] = set()
    for distribution in importlib.metadata.distributions():
        if not _may_be_ours(distribution):
            continue
        package, version = (
            distribution.metadata["Name"] or "unknown",
            distribution.metadata["Version"] or "",
        )
        key = re.sub(r"[-_.]+", "-", package).lower()
        if key in seen:
            continue
        seen.add(key)
        try:
            points = [point for point in distribution.entry_points if point.group == PROJECT]
        except Exception as error:
            yield package, version, error
            continue
        for point in sorted(points, key=lambda point: point.name):
            yield Found(package, version, point.name, point.value)


def _may_be_ours(distribution: importlib.metadata.Distribution) -> bool:
    """Whether it has entry points of our group; true too of a file that cannot be decoded, which is then said."""
    try:
        text = distribution.read_text("entry_points.txt") or ""
    except UnicodeDecodeError:
        return True
    return re.search(rf"^\s*\[\s*{PROJECT}\s*\]", text, re.MULTILINE) is not None
