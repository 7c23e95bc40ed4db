"""`hybridflow report`: one HTML page of runs."""

from __future__ import annotations

import argparse
import webbrowser
from pathlib import Path

from hybridflow.core.contracts.command import Command
from hybridflow.core.values.files import REPORT
from hybridflow.kit.console import make_console, print_line
from hybridflow.kit.runs import find_runs


class ReportCommand(Command):
    """A plugin of kind "command", name "report"."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "runs", nargs="+", type=Path, help="runs, or folders with runs; several are compared"
        )
        parser.add_argument(
            "--out",
            type=Path,
            help=f"the file; default: {REPORT} in the folder of one run, or here of several",
        )
        parser.add_argument("--open", action="store_true", help="open it in a browser")

    def run(self, arguments: argparse.Namespace) -> int:
        """Write the page, and say where it is and what the rules have found."""
        from hybridflow.report.building import write_report

        out = arguments.out
        if out is None:
            inside = len(arguments.runs) == 1 and find_runs(arguments.runs[0])
            out = (arguments.runs[0] if inside else Path()) / REPORT
        file = write_report(arguments.runs, out)
        print_line(make_console(), f"{file}: {file.stat().st_size / 1e6:.1f} MB")
        if arguments.open:
            webbrowser.open(file.resolve().as_uri())
        return 0
