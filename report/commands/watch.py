"""`hybridflow watch`: the page of a run that goes on, served on this machine alone."""

from __future__ import annotations

import argparse
import contextlib
import webbrowser
from pathlib import Path

from rich.progress import BarColumn, Progress, TextColumn

from hybridflow.core.contracts.command import Command
from hybridflow.core.errors import ConfigError
from hybridflow.core.names import reason
from hybridflow.kit.console import make_console, print_line
from hybridflow.kit.runs import FoundRun, find_runs

EVERY_S = 1.0
"""Seconds between two looks at the folders, for the terminal."""


class WatchCommand(Command):
    """A plugin of kind "command", name "watch"."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("runs", nargs="+", type=Path, help="runs, or folders with runs")
        parser.add_argument("--port", type=int, default=0, help="default: one that is free")
        parser.add_argument("--open", action="store_true", help="open it in a browser")

    def run(self, arguments: argparse.Namespace) -> int:
        """Serve the page until Ctrl-C; on a terminal each run has a bar of its steps."""
        from hybridflow.report.serving import PageServer

        find_runs_of(arguments.runs)  # raises where there is none
        console = make_console()
        try:
            server = PageServer(arguments.runs, arguments.port)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"--port {arguments.port}: cannot be listened on: {reason(error)}"
            ) from error
        with server:
            print_line(console, f"{server.address} (Ctrl-C ends it)")
            if arguments.open:
                webbrowser.open(server.address)
            columns = (
                TextColumn("{task.description}"),
                BarColumn(bar_width=20),
                TextColumn("{task.completed:.0f} of {task.total:.0f}, {task.fields[state]}"),
            )
            # Without a terminal there are no bars: a file would fill with them.
            with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
                tasks: dict[Path, int] = {}
                # Ctrl-C is how it ends.
                with contextlib.suppress(KeyboardInterrupt):
                    while not server.ended.wait(EVERY_S):
                        if console.is_terminal:
                            _show(bars, tasks, find_runs_of(arguments.runs))
        return 0


def find_runs_of(folders: list[Path]) -> list[FoundRun]:
    """Return the runs in these folders."""
    return [run for folder in folders for run in find_runs(folder)]


def _show(bars: Progress, tasks: dict, runs: list[FoundRun]) -> None:
    for run in runs:
        total = run.settings.get("run.steps") or run.step
        if run.folder not in tasks:
            tasks[run.folder] = bars.add_task(str(run.folder), total=total, state=run.state)
        score = "" if run.score is None else f", score {run.score:.3f}"
        bars.update(tasks[run.folder], completed=run.step, total=total, state=f"{run.state}{score}")
