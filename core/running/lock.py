"""The lock of a folder, by which one process at a time works in it."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hybridflow.core.errors import ConfigError
from hybridflow.core.values.files import LOCK


@contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Make a folder, and hold its lock while the body runs.

    Raises ConfigError if another process holds it, and where it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / LOCK).touch()
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be made or written: {error.strerror or error}; free disk space, or "
            "set run.folder to another place"
        ) from error
    with open(folder / LOCK, "a+") as lock:
        # The system releases the lock when the process ends in any way.
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(
                f"another process runs in {folder}; wait for it, "
                "or give this run a folder of its own (run.name=...)"
            ) from error
        yield


def is_held(folder: Path) -> bool:
    """Return whether a process holds the lock of a folder."""
    if not (folder / LOCK).is_file():
        return False
    with open(folder / LOCK) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False
