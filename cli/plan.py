"""`hybridflow plan`: the best placement of a config's models on a cluster, before anything runs.

It says where every model goes, how long a step takes, and whether the memory is enough.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from hybridflow.cli.arguments import add_config
from hybridflow.cli.pictures import draw_steps
from hybridflow.cli.written import write_config
from hybridflow.core.contracts.command import Command
from hybridflow.core.contracts.planner import Block, Line, Plan
from hybridflow.core.errors import ConfigError
from hybridflow.core.job.job import Job
from hybridflow.kit.console import make_console, print_line, print_table
from hybridflow.settle.config.load import read_config
from hybridflow.settle.placement import planner_of, whole, without_places
from hybridflow.settle.resolve import resolve_jobs
from hybridflow.settle.stages import shadowed_overrides


class PlanCommand(Command):
    """A plugin of kind "command", name "plan"."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_config(parser)
        parser.add_argument(
            "--cluster",
            metavar="WHAT",
            help="a TOML file, or DEVICE:[NODESx]DEVICES[@GBIT/S] as in a100-80gb:2x8",
        )
        parser.add_argument(
            "--write", metavar="FILE", help="write the config with these pools and layouts"
        )
        parser.add_argument(
            "--what-if",
            metavar="devices=N,...",
            help="table other numbers of devices: devices=64,128,256",
        )
        parser.add_argument(
            "--timeline", metavar="FILE", help="draw the step: a file ending in .svg or .png"
        )
        parser.add_argument(
            "--dry-run",
            action="store_true",
            help="take the memory from the backends' own code, without devices: minutes",
        )

    def run(self, arguments: argparse.Namespace) -> int:
        a = arguments
        sizes = read_sizes(a.what_if)
        plan(a.config, a.overrides, a.cluster, a.write, sizes, a.timeline, dry_run=a.dry_run)
        return 0


def read_sizes(text: str | None) -> list[int]:
    """Return the numbers of "devices=64,128", [] for None. Raises ConfigError."""
    if text is None:
        return []
    key, _, rest = text.partition("=")
    sizes = rest.split(",")
    if key != "devices" or not all(size.isdigit() and int(size) for size in sizes):
        raise ConfigError(f"--what-if {text!r}: write devices=64,128,256")
    return [int(size) for size in sizes]


def plan(
    path: str | Path,
    overrides: Sequence[str] = (),
    cluster: str | None = None,
    write: str | None = None,
    what_if: Sequence[int] = (),
    timeline: str | None = None,
    console: Console | None = None,
    dry_run: bool = False,
) -> None:
    """Print the best placement of each run stage of a config; starts nothing.

    `write` and `timeline` are files for the config with this placement, and for a picture of the
    step. With `dry_run` it also prints the memory that the backends' own code allocates. With
    `what_if` it prints a table of these numbers of devices instead. Raises HybridFlowError where
    nothing fits.
    """
    console = console or make_console()
    if what_if and (write or timeline or dry_run):
        raise ConfigError(
            "--what-if tables many plans; leave out --write, --timeline and --dry-run, which are "
            "of one"
        )
    if write and overrides:
        raise ConfigError(
            "--write keeps the file's own settings: put the overrides into it first, or leave "
            "them out"
        )

    # Every run stage needs a cluster, of the command line or of its own.
    jobs, auto = unplaced_jobs(path, overrides)
    clusters = {job.stage: cluster or job.placement.cluster or "" for job in jobs}
    if "" in clusters.values():
        raise ConfigError(
            "which cluster? Give --cluster, or placement.cluster in the config: a TOML file "
            "(docs/mapping.md), or a known device, nodes and devices of each, as in a100-80gb:2x8"
        )

    # Tables of other numbers of devices ...
    if what_if:
        for job in jobs:
            _head(console, job)
            _print(console, planner_of(job).scaling(job, clusters[job.stage], what_if))
        return

    # Otherwise print the plans; write and draw them if asked.
    plans = _print_plans(console, jobs, clusters, auto)
    if write is not None:
        settings = {stage: best.settings for stage, best in plans.items()}
        kept = write_config(path, write, settings, cluster)
        remark = "" if kept else " (its comments could not be kept)"
        print_line(console)
        print_line(console, f"written: {write}{remark}")
    if timeline is not None:
        draw_steps(timeline, plans)
        print_line(console, f"drawn: {timeline}")

    # The slowest part comes last, and prints its progress.
    if dry_run:
        for job in jobs:
            _head(console, job)
            _print(console, planner_of(job).rehearse(job, clusters[job.stage]))


def _print_plans(
    console: Console,
    jobs: Sequence[Job],
    clusters: Mapping[str | None, str],
    auto: Sequence[str | None],
) -> dict[str | None, Plan]:
    """Plan each job, print the explanations, and return the plans by run stage.

    The cluster is printed where it is another than that of the run stage before.
    """
    # A plan compares itself with the config's own placement, where there is one.
    plans: dict[str | None, Plan] = {}
    printed = ""
    for job in jobs:
        best = planner_of(job).plan(job, clusters[job.stage], placed=job.stage not in auto)
        if best.cluster != printed:
            print_line(console, best.cluster)
            printed = best.cluster
        _head(console, job)
        _print(console, best.explanation)
        plans[job.stage] = best
    return plans


def unplaced_jobs(path: str | Path, overrides: Sequence[str]) -> tuple[list[Job], list[str | None]]:
    """Return the jobs of a config that is to run elsewhere, and the run stages with placement =
    "auto".
    """
    tables, provenance = read_config(path, overrides)
    unplaced, auto = without_places(tables)
    problems = shadowed_overrides(tables, provenance)
    if problems:
        raise ConfigError(problems)

    # A plugin that is missing here may be installed where the job will run.
    name = Path(path).stem
    jobs = resolve_jobs(whole(unplaced), name, elsewhere=True, unplaced=auto)
    return jobs, auto


def _head(console: Console, job: Job) -> None:
    """Print the name of the job's run stage, if it has one."""
    print_line(console)
    if job.stage:
        print_line(console, f"stage {job.stage}", "bold underline")


def _print(console: Console, blocks: Iterable[Block]) -> None:
    """Print what the planner says: a Line as styled text, any other block as a table."""
    for block in blocks:
        if isinstance(block, Line):
            print_line(console, block.text, block.style)
        else:
            print_table(console, block.columns, block.rows)
