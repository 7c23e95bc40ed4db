"""Runs as their folders say: what they were, how far they came, and what they logged.

Nothing here imports torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs

from hybridflow.core.errors import ConfigError, DamagedError
from hybridflow.core.running.checkpoint import Checkpoints
from hybridflow.core.running.lock import is_held
from hybridflow.core.values.files import (
    CHECKPOINTS,
    CONFIG,
    DONE,
    EXPORT,
    MARK,
    METRICS,
    SETTINGS,
)
from hybridflow.core.values.sealed import read_sealed

SCORE = "validation/score"
DEPTH = 3
"""How many folders below the given one a run may lie: a run, a stage, one more."""


@attrs.frozen
class FoundRun:
    """A run, as read from its folder."""

    folder: Path
    algorithm: str
    settings: dict[str, Any]
    """The resolved settings, by dotted key."""
    state: str
    """The state: "finished", "running", "ended" if it was killed or stopped before its end, or
    "damaged" if a file that says so is not as it was written."""
    step: int
    """The last completed step."""
    score: float | None
    """The last validation's score."""
    kept: str
    """The models on disk in words: an export, and the steps of checkpoints."""
    changed: float
    """When it was last written to, in seconds since 1970."""
    nbytes: int


def find_runs(folder: Path) -> list[FoundRun]:
    """Return the runs in a folder, or the run that it is. Raises ConfigError if there is none."""
    if not folder.is_dir():
        raise ConfigError(f"{folder}: there is no such folder")
    marks = [folder / MARK] if (folder / MARK).is_file() else sorted(_marks(folder, DEPTH))
    if not marks:
        raise ConfigError(f"{folder}: has no runs")
    return [_read(mark.parent) for mark in marks]


def _marks(folder: Path, depth: int) -> Iterator[Path]:
    """Yield the mark file of each run below a folder; runs are not nested."""
    for path in folder.iterdir():
        if (path / MARK).is_file():
            yield path / MARK
        elif path.is_dir() and depth > 1:
            yield from _marks(path, depth - 1)


def _read(folder: Path) -> FoundRun:
    """Return the run of a folder; damaged files are told in its state."""
    mark, damaged = read_mark(folder / MARK)
    done, undone = read_mark(folder / DONE) if (folder / DONE).is_file() else (None, False)
    algorithm = mark.get(CONFIG, {}).get("algorithm", {}) if mark else ""
    stats = list(_stats(folder))
    steps = Checkpoints(folder / CHECKPOINTS, 1).steps()

    # Steps and scores: of a finished run, else as far as they were logged or kept.
    rows = logged(folder)
    step = max([row.get("step", 0) for row in rows] + steps, default=0)
    scores = [row[SCORE] for row in rows if SCORE in row]
    if done:
        step = done["step"]
        scores = [own[SCORE] for own in done["validations"].values() if SCORE in own]
    kept = [f"step {number}" for number in steps]
    if (folder / EXPORT).is_dir():
        kept.insert(0, "exported")
    return FoundRun(
        folder=folder,
        algorithm=algorithm if isinstance(algorithm, str) else algorithm.get("name", ""),
        settings=(mark or {}).get(SETTINGS) or {},
        state=_state(folder, damaged or undone, done is not None),
        step=int(step),
        score=scores[-1] if scores else None,
        kept=", ".join(kept),
        changed=max(stat.st_mtime for stat in stats),
        nbytes=sum(stat.st_size for stat in stats),
    )


def read_mark(file: Path) -> tuple[dict[str, Any] | None, bool]:
    """Return a file's content, and whether it is damaged."""
    try:
        return read_sealed(file), False
    except DamagedError:
        return None, True


def _state(folder: Path, damaged: bool, finished: bool) -> str:
    if is_held(folder):
        return "running"
    if damaged:
        return "damaged"
    return "finished" if finished else "ended"


def _stats(folder: Path) -> Iterator[os.stat_result]:
    """Yield the stat result of each file; files that a run removes meanwhile are skipped."""
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            if path.is_file():
                yield path.stat()


def logged(folder: Path) -> list[dict[str, Any]]:
    """Return the logged metrics; lines that are damaged or being written are left out."""
    file = folder / METRICS
    if not file.is_file():
        return []
    rows = []
    for line in file.read_text(errors="replace").splitlines(keepends=True):
        with suppress(ValueError, RecursionError):
            row = json.loads(line) if line.endswith("\n") else None
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                rows.append(row)
    return rows


def differing(runs: Sequence[FoundRun]) -> dict[str, list[Any]]:
    """Return the settings that are not the same in all runs, with the value of each."""
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    values = {key: [run.settings.get(key) for run in runs] for key in keys}
    return {key: own for key, own in values.items() if any(value != own[0] for value in own)}
