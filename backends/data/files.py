"""What the sources that read from disk check before they read."""

from __future__ import annotations

from pathlib import Path

from hybridflow.core.contracts.data_source import DataConfig
from hybridflow.core.errors import DataError


def data_path(config: DataConfig) -> Path:
    """data.path, which must exist."""
    if not config.path:
        raise DataError(f"data source {config.source!r} reads from disk; set data.path")
    path = Path(config.path)
    if not path.exists():
        parent = next(p for p in (path.parent, *path.parent.parents) if p.exists())
        there = ", ".join(sorted(p.name for p in parent.iterdir())[:8]) or "nothing"
        raise DataError(
            f"data.path: there is no {str(path)!r} ({str(parent)!r} has {there}); give an existing one"
        )
    return path


def data_file(config: DataConfig, endings: tuple[str, ...], others: str) -> Path:
    """data.path, which must be a file with one of these endings and at least one byte; `others`: where else to go."""
    path = data_path(config)
    if path.is_dir():
        raise DataError(
            f"data.path: {str(path)!r} is a folder and source {config.source!r} reads a file; {others}"
        )
    if not path.name.lower().endswith(endings):
        raise DataError(
            f"data.path: {str(path)!r} does not end in {' or '.join(endings)}, which is what source {config.source!r} "
            f"reads; {others}"
        )
    if path.stat().st_size == 0:
        raise DataError(f"data.path: {str(path)!r} is empty; write it again or give another file")
    return path
