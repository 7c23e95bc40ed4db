"""`hybridflow sweep`: a config with every combination of some settings, and one table at the end.

lr=1e-3,1e-4 seeds=2    ->   lr=1e-3,seed=0   lr=1e-3,seed=1   lr=1e-4,seed=0   lr=1e-4,seed=1
                                  |                |                |                |
                             hybridflow run ...    processes of their own, some at a time
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from hybridflow.core.contracts.command import Command
from hybridflow.core.errors import ConfigError
from hybridflow.kit.console import make_console, print_line, print_table
from hybridflow.kit.runs import FoundRun, find_runs
from hybridflow.settle.config.load import read_config

if TYPE_CHECKING:
    from hybridflow.core.job.job import Job

SEEDS = "seeds"
"""The key that stands for run.seed, from 0 on."""
LOOK_S = 0.2
"""Seconds between two checks of whether a run has ended."""


class SweepCommand(Command):
    """A plugin of kind "command", name "sweep"."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("config", help="a TOML file")
        parser.add_argument(
            "overrides",
            nargs="*",
            default=[],
            metavar="key=value,value",
            help="settings: those with several values are varied; seeds=3 is run.seed=0,1,2",
        )
        parser.add_argument(
            "--at-once", type=int, help="runs at a time; default: as many as the devices allow"
        )
        parser.add_argument("--name", help="folder of the runs; default: CONFIG-sweep")

    def run(self, arguments: argparse.Namespace) -> int:
        """Run the points that are not finished, and print the table; return 1 if a run failed."""
        varied, common = split(arguments.overrides)
        if arguments.at_once is not None and arguments.at_once < 1:
            raise ConfigError(f"--at-once: is {arguments.at_once}; give 1 or more")
        from hybridflow.settle.launch import load_config

        # All combinations are checked before the first one starts.
        tables, _ = read_config(arguments.config, common)
        name = arguments.name or f"{Path(arguments.config).stem}-sweep"
        folder = Path(tables.get("run", {}).get("folder", "runs")) / name
        points = points_of(varied)
        jobs = {
            point: load_config(arguments.config, point.overrides(common, folder))
            for point in points
        }
        slots = slots_of(jobs[points[0]], arguments.at_once)
        folder.mkdir(parents=True, exist_ok=True)

        console = make_console()
        last = jobs[points[0]][-1].stage or ""
        left = [point for point in points if not _is_done(jobs[point])]
        print_line(
            console, f"{len(points)} runs in {folder}, {len(left)} to do, {len(slots)} at a time"
        )
        for point in left:
            _remove_lost(jobs[point])
        failed = _run_all(arguments.config, common, folder, left, slots)
        print_results(folder, points, last, failed)
        return 1 if failed else 0


@attrs.frozen
class Point:
    """One combination of values."""

    values: tuple[tuple[str, str], ...]
    """(key, value) of the settings that are varied, in order."""

    @property
    def name(self) -> str:
        """Its folder's name: the keys' last parts and the values."""
        parts = [f"{key.rpartition('.')[2]}={value}" for key, value in self.values]
        return re.sub(r"[^\w.=,+-]+", "_", ",".join(parts)) or "run"

    def overrides(self, common: Sequence[str], folder: Path) -> list[str]:
        """Return the overrides of its run."""
        own = [f"{key}={value}" for key, value in self.values]
        return [*common, *own, f"run.folder={folder}", f"run.name={self.name}"]


def split(overrides: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Return (key -> its values, of those with several; the other overrides).

    Commas inside brackets, braces and quotes belong to a value. Raises ConfigError if the number of
    seeds is not a positive integer.
    """
    varied: dict[str, list[str]] = {}
    common = []
    for text in overrides:
        key, equals, value = text.partition("=")
        if key == SEEDS:
            if not value.isdecimal() or int(value) < 1:
                raise ConfigError(f"{text}: give a number of seeds, 1 or more")
            varied["run.seed"] = [str(seed) for seed in range(int(value))]
            continue
        values = _at_commas(value)
        if not equals or len(values) == 1:
            common.append(text)
        else:
            varied[key] = values
    return varied, common


def _at_commas(text: str) -> list[str]:
    """Cut a text at commas that are in no brackets, braces or quotes."""
    parts = [""]
    depth = 0
    quote = ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        else:
            depth += {"[": 1, "{": 1, "(": 1, "]": -1, "}": -1, ")": -1}.get(letter, 0)
            if letter == "," and depth == 0:
                parts.append("")
                continue
        parts[-1] += letter
    return [part.strip() for part in parts]


def points_of(varied: dict[str, list[str]]) -> list[Point]:
    """Return every combination. Raises ConfigError for two of the same name."""
    points = [
        Point(tuple(zip(varied, values, strict=True)))
        for values in itertools.product(*varied.values())
    ]
    if len({point.name for point in points}) < len(points):
        raise ConfigError(
            "two combinations have one name, as keys with equal ends or equal values do; give each "
            "value once, and sweeps of their own to such keys"
        )
    return points


def _is_done(jobs: Sequence[Job]) -> bool:
    """Return whether all stages have finished with these settings."""
    from hybridflow.settle.changes import changes
    from hybridflow.settle.kept import read_done, to_train

    for job in jobs:
        done = read_done(job)
        if done is None or to_train(job, done) or changes(job):
            return False
    return True


def _remove_lost(jobs: Sequence[Job]) -> None:
    """Remove the folders of stages that ended before their first checkpoint."""
    from hybridflow.core.running.checkpoint import checkpoints_of
    from hybridflow.settle.kept import read_done

    for job in jobs:
        if not checkpoints_of(job).steps() and read_done(job) is None:
            shutil.rmtree(job.folder, ignore_errors=True)


def slots_of(jobs: Sequence[Job], at_once: int | None) -> list[dict[str, str]]:
    """Return the environment variables of each concurrent run, which select its GPUs.

    at_once: the number of concurrent runs; None: as many as the devices of this machine allow. Runs
    on a cluster go one at a time, since its devices are not known here.
    """
    import torch

    from hybridflow.core.contracts.runtime import runtime_settings

    most = max(
        sum(pool.world for pool in job.pools.values() if pool.device is None) for job in jobs
    )
    if runtime_settings(jobs[0].runtime_config).remote:
        return [{}] * (at_once or 1)
    if jobs[0].device != "cuda":
        threads = getattr(jobs[0].runtime_config, "threads", None) or 1
        return [{}] * (at_once or max(1, (os.cpu_count() or 1) // (most * threads)))

    # Each gets devices of its own; with more runs than that, some share.
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = seen.split(",") if seen else [str(n) for n in range(torch.cuda.device_count())]
    parts = [devices[at : at + most] for at in range(0, len(devices) - most + 1, most)]
    slots = [{"CUDA_VISIBLE_DEVICES": ",".join(part)} for part in parts or [devices]]
    return [slots[at % len(slots)] for at in range(at_once or len(slots))]


def _run_all(
    config: str,
    common: Sequence[str],
    folder: Path,
    left: Sequence[Point],
    slots: Sequence[dict[str, str]],
) -> dict[str, str]:
    """Run the points, one in each slot at a time; return name of a failed one -> its last line."""
    console = make_console()
    waiting = list(left)
    free = list(slots)
    running: dict[str, tuple[subprocess.Popen, dict[str, str]]] = {}
    failed: dict[str, str] = {}
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        while waiting or running:
            while waiting and free:
                point, slot = waiting.pop(0), free.pop(0)
                process = _start(config, point.overrides(common, folder), folder, point, slot)
                running[point.name] = (process, slot)
                print_line(console, f"{point.name}: started")
            for name, (process, slot) in list(running.items()):
                status = process.poll()
                if status is None:
                    continue
                del running[name]
                free.append(slot)
                if status:
                    log = (folder / f"{name}.log").read_text().strip().splitlines()
                    failed[name] = log[-1] if log else f"exit status {status}"
                print_line(console, f"{name}: {'failed' if status else 'finished'}")
            time.sleep(LOOK_S)
    finally:
        # Told to stop, a run writes a checkpoint, from which the next sweep goes on.
        for process, _ in running.values():
            process.terminate()
        for process, _ in running.values():
            process.wait()
        signal.signal(signal.SIGTERM, before)
    return failed


def _interrupt(number: int, frame: object) -> None:
    """Raise KeyboardInterrupt: SIGTERM ends the sweep as Ctrl-C does."""
    raise KeyboardInterrupt


def _start(
    config: str, overrides: Sequence[str], folder: Path, point: Point, slot: dict[str, str]
) -> subprocess.Popen:
    """Start a run, or resume one that was interrupted."""
    command = [sys.executable, "-P", "-m", "hybridflow.cli.main", "run", config, *overrides]
    if (folder / point.name).is_dir():
        command.append("--resume")

    # In a session of its own, so that Ctrl-C reaches the sweep alone, which ends it by SIGTERM.
    with open(folder / f"{point.name}.log", "a") as log:
        return subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **slot},
            start_new_session=True,
        )


def print_results(
    folder: Path, points: Sequence[Point], stage: str, failed: dict[str, str]
) -> None:
    """Print a row for each run, failed ones too, and one for each setting over its seeds."""
    console = make_console()
    keys = [key for key, _ in points[0].values]
    rows = []
    by_setting: dict[tuple[str, ...], list[float]] = {}
    for point in points:
        found = _found(folder / point.name / stage)
        values = [value for _, value in point.values]
        score = "" if found is None or found.score is None else f"{found.score:.3f}"
        state = "failed" if point.name in failed else found.state if found else "not begun"
        step = str(found.step) if found else ""
        rows.append((*values, state, step, score, failed.get(point.name, "")))
        if found is not None and found.score is not None and point.name not in failed:
            own = tuple(value for key, value in point.values if key != "run.seed")
            by_setting.setdefault(own, []).append(found.score)
    print_table(console, (*keys, "state", "step", "score", "why"), rows)

    # Means over seeds, where there are several
    if "run.seed" in keys and max(map(len, by_setting.values()), default=0) > 1:
        others = [key for key in keys if key != "run.seed"]
        means = []
        for own, scores in by_setting.items():
            error = statistics.stdev(scores) / len(scores) ** 0.5 if len(scores) > 1 else 0.0
            means.append((*own, f"{statistics.mean(scores):.3f}", f"{error:.3f}", str(len(scores))))
        print_line(console)
        print_table(console, (*others, "mean score", "standard error", "seeds"), means)


def _found(folder: Path) -> FoundRun | None:
    """Return the run in a folder; None where it has not begun."""
    try:
        return find_runs(folder)[0]
    except ConfigError:
        return None
