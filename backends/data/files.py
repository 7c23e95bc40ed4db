"""Checks of data.path, for the sources that read from disk."""

from __future__ import annotations

from pathlib import Path

from hybridflow.core.contracts.data_source import DataConfig
from hybridflow.core.errors import DataError


def data_path(config: DataConfig) -> Path:
    """Return data.path.

    Raises DataError if it is not set, or if there is no such file or folder; the message then lists
    what is in the nearest folder that exists.
    """
    if not config.path:
        raise DataError(f"data source {config.source!r} reads from disk; set data.path")

    path = Path(config.path)
    if not path.exists():
        # The search ends, since "/" or "." always exists.
        parents = (path.parent, *path.parent.parents)
        parent = next(folder for folder in parents if folder.exists())
        # Files of its kind come first; eight names show which folder it is.
        names = sorted(entry.name for entry in parent.iterdir())
        near = [name for name in names if Path(name).suffix == path.suffix]
        listing = ", ".join([*near, *(name for name in names if name not in near)][:8])
        raise DataError(
            f"data.path: there is no {str(path)!r} "
            f"({str(parent.absolute())!r} has {listing or 'nothing'}); give an existing one"
        )
    return path


def data_file(config: DataConfig, endings: tuple[str, ...], others: str) -> Path:
    """Return data.path, a file with at least one byte and one of these endings.

    others: the remedy for a path of another kind, for messages. Raises DataError.
    """
    path = data_path(config)
    if path.is_dir():
        raise DataError(
            f"data.path: {str(path)!r} is a folder and source {config.source!r} reads a file; "
            f"{others}"
        )

    # Endings are compared without case: Rows.JSONL is read too.
    if not path.name.lower().endswith(endings):
        raise DataError(
            f"data.path: {str(path)!r} does not end in {' or '.join(endings)}, which is what "
            f"source {config.source!r} reads; {others}"
        )
    if path.stat().st_size == 0:
        raise DataError(f"data.path: {str(path)!r} is empty; write it again or give another file")
    return path
