"""`hybridflow runs`: lists, compares and deletes the runs of a folder.

It reads what runs have written, and imports no torch.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs

from hybridflow.core.contracts.command import Command
from hybridflow.core.errors import ConfigError, DamagedError
from hybridflow.core.running.checkpoint import Checkpoints
from hybridflow.core.running.lock import hold, is_held
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
from hybridflow.core.values.units import amount
from hybridflow.kit.console import make_console, print_line, print_table

SCORE = "validation/score"
DEPTH = 3
"""How many folders below the given one a run may lie: a run, a stage, one more."""


class RunsCommand(Command):
    """A plugin of kind "command", name "runs"."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "folders", nargs="*", type=Path, help="folders with runs, or runs; default: runs"
        )
        what = parser.add_mutually_exclusive_group()
        what.add_argument(
            "--compare", action="store_true", help="print the settings and scores that differ"
        )
        what.add_argument(
            "--delete", action="store_true", help="delete these runs, after a question"
        )
        parser.add_argument("--yes", action="store_true", help="delete without the question")

    def run(self, arguments: argparse.Namespace) -> int:
        """List, compare or delete runs; return 1 if a deletion is not confirmed, else 0."""
        if arguments.delete and not arguments.folders:
            raise ConfigError("--delete: name the runs to delete")
        runs = [run for folder in arguments.folders or [Path("runs")] for run in find_runs(folder)]
        if arguments.compare:
            compare(runs)
        elif arguments.delete:
            return delete(runs, arguments.yes)
        else:
            list_runs(runs)
        return 0


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
    mark, damaged = _sealed(folder / MARK)
    done, undone = _sealed(folder / DONE) if (folder / DONE).is_file() else (None, False)
    algorithm = mark.get(CONFIG, {}).get("algorithm", {}) if mark else ""
    stats = list(_stats(folder))
    steps = Checkpoints(folder / CHECKPOINTS, 1).steps()

    # Steps and scores: of a finished run, else as far as they were logged or kept.
    rows = _metrics(folder)
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


def _sealed(file: Path) -> tuple[dict[str, Any] | None, bool]:
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


def _metrics(folder: Path) -> list[dict[str, Any]]:
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


def list_runs(runs: Sequence[FoundRun]) -> None:
    """Print a table of the runs, the one that was last written to at the end."""
    rows = [
        (
            str(run.folder),
            run.algorithm,
            run.state,
            str(run.step),
            "" if run.score is None else f"{run.score:.3f}",
            run.kept,
            time.strftime("%Y-%m-%d %H:%M", time.localtime(run.changed)),
            amount(run.nbytes),
        )
        for run in sorted(runs, key=lambda run: run.changed)
    ]
    titles = ("run", "algorithm", "state", "step", "score", "kept", "changed", "size")
    print_table(make_console(), titles, rows)


def compare(runs: Sequence[FoundRun]) -> None:
    """Print the scores of the runs, and the settings that are not the same in all of them."""
    if len(runs) < 2:
        raise ConfigError("--compare: needs two runs at least")
    names = [str(run.folder) for run in runs]
    rows = [
        ("score", *("" if run.score is None else f"{run.score:.3f}" for run in runs)),
        ("step", *(str(run.step) for run in runs)),
    ]
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    for key in keys:
        values = [run.settings.get(key) for run in runs]
        if any(value != values[0] for value in values):
            rows.append((key, *(json.dumps(value) for value in values)))
    print_table(make_console(), ("", *names), rows)


def delete(runs: Sequence[FoundRun], yes: bool) -> int:
    """Delete the folders of runs, none of which may be running; ask first, unless `yes`."""
    console = make_console()
    held = [str(run.folder) for run in runs if run.state == "running"]
    if held:
        raise ConfigError(f"--delete: {', '.join(held)} is running; stop it first")
    for run in runs:
        score = "" if run.score is None else f", score {run.score:.3f}"
        print_line(console, f"{run.folder}: step {run.step}{score}, {amount(run.nbytes)}")
    if not yes:
        if not sys.stdin.isatty():
            raise ConfigError("--delete: nobody is there to be asked; give --yes")
        if input(f"delete {len(runs)} run{'s' if len(runs) > 1 else ''}? [y/N] ").strip() != "y":
            return 1
    for run in runs:
        with hold(run.folder):  # none may begin meanwhile
            shutil.rmtree(run.folder)
    return 0
