"""`hybridflow runs`: lists, compares and deletes the runs of a folder.

It reads what runs have written, and imports no torch.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from hybridflow.core.contracts.command import Command
from hybridflow.core.errors import ConfigError
from hybridflow.core.running.lock import hold
from hybridflow.core.values.units import amount
from hybridflow.kit.console import make_console, print_line, print_table
from hybridflow.kit.runs import FoundRun, differing, find_runs


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
    for key, values in differing(runs).items():
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
