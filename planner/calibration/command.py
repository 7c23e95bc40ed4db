"""`hybridflow calibrate`: measures this machine and writes a cluster file for `hybridflow plan`."""

from __future__ import annotations

import argparse
import datetime
import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import torch
from rich.console import Console

from hybridflow.core.contracts.command import Command
from hybridflow.core.errors import ConfigError
from hybridflow.kit.console import make_console, print_line, print_table
from hybridflow.planner.cluster import DEVICES
from hybridflow.settle.config.load import read_config
from hybridflow.settle.stages import stage_tables

if TYPE_CHECKING:
    from hybridflow.planner.calibration.calibrate import Calibration

DIGITS = 4
"""Number of significant digits in the file."""
NAMES = {
    "infer": "inference",
    "train": "training",
    "sync": "weights to the engine",
    "generate": "generation",
}
"""Verb -> its name in the report."""


class CalibrateCommand(Command):
    """A plugin of kind "command", name "calibrate"."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "config",
            nargs="?",
            help="a TOML file: its backend, engine, runtime and devices are measured",
        )
        parser.add_argument(
            "overrides",
            nargs="*",
            default=[],
            metavar="key=value",
            help="for example actor.backend.precision=bf16",
        )
        parser.add_argument(
            "--devices",
            type=int,
            metavar="N",
            help="default: those of the config's pool main, or all GPUs here, or 1",
        )
        parser.add_argument("--name", help="what the device is called in the file")
        parser.add_argument(
            "--write", metavar="FILE", help="write the cluster file; else it is printed"
        )

    def run(self, arguments: argparse.Namespace) -> int:
        a = arguments
        run_calibrate(a.config, a.overrides, a.devices, a.name, a.write)
        return 0


def run_calibrate(
    path: str | Path | None,
    overrides: Sequence[str] = (),
    devices: int | None = None,
    name: str | None = None,
    write: str | None = None,
    console: Console | None = None,
) -> None:
    """Measure this machine, and print or write its cluster file.

    Raises ConfigError before anything starts.
    """
    console = console or make_console()
    try:
        # Here, so that the command's help does not need scipy.
        from hybridflow.planner.calibration.calibrate import calibrate
    except ImportError as error:
        raise ConfigError(
            f"calibrate needs scipy ({error}): pip install 'hybridflow[calibrate]'"
        ) from error
    if write is not None and not Path(write).absolute().parent.is_dir():
        raise ConfigError(f"--write {write!r}: there is no folder {str(Path(write).parent)!r}")

    # All devices of the config's pool, else all GPUs, else one CPU rank.
    given = _tables(path, overrides)
    if devices is None:
        in_pool = sum(_flat(given.get("pools", {}).get("main", [])))
        devices = in_pool or max(1, torch.cuda.device_count())
    calibration = calibrate(given, devices, name, lambda text: print_line(console, text))

    print_line(console)
    _report(console, calibration)
    text = cluster_toml(calibration)
    print_line(console)
    if write is None:
        print_line(console, text)
        return
    Path(write).write_text(text)
    print_line(console, f"written: {write}; hybridflow plan CONFIG --cluster {write}")


def _tables(path: str | Path | None, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the tables of a config's last run stage, the one that generates where any does."""
    if path is None and overrides:
        raise ConfigError(
            f"overrides are of a config, and none is given: calibrate CONFIG {' '.join(overrides)}"
        )
    if path is None:
        return {}

    # Earlier stages often train without an engine (pretraining, rewards).
    tables, _ = read_config(path, overrides)
    stages = stage_tables(tables)
    return dict([*stages.values()][-1])


def _flat(pool: Any) -> list[int]:
    """Return the devices per node of a pool's setting; [] if it is no list, as "auto" may be."""
    return [n for n in pool if isinstance(n, int)] if isinstance(pool, list) else []


def _report(console: Console, calibration: Calibration) -> None:
    """Print the device, its efficiencies, and how well the simulators fit the samples."""
    device = calibration.nodes.device
    e = calibration.nodes.efficiency
    print_line(
        console,
        f"{device.name}: {device.memory_gb:.4g} GB, {device.tflops:.3g} TFLOP/s, "
        f"{device.bandwidth_gbs:.3g} GB/s of memory, {device.link_gbs:.3g} GB/s of link",
        "bold",
    )
    print_line(
        console,
        f"reached: {100 * e.training:.0f}% of the products in training, "
        f"{100 * e.inference:.0f}% in inference, {100 * e.memory:.0f}% of the memory when "
        f"decoding; a message takes {e.link_latency_us:.3g} us",
    )

    # How well the simulators explain the samples, verb by verb.
    rows = []
    for verb, name in NAMES.items():
        errors = abs(calibration.errors(verb))
        mean = f"{100 * errors.mean():.0f}%"
        largest = f"{100 * errors.max():.0f}%"
        rows.append((name, str(len(errors)), mean, largest))
    print_table(console, ("fitted", "samples", "mean error", "largest"), rows)


def cluster_toml(found: Calibration) -> str:
    """Return the cluster file of this machine, as text (docs/mapping.md)."""
    import tomlkit

    nodes = found.nodes
    device = nodes.device
    document = tomlkit.document()
    document.add(
        tomlkit.comment(
            "What `hybridflow calibrate` found; count and between_gbps are yours to set."
        )
    )
    # A single machine: the number of machines and their network cannot be measured.
    machines = tomlkit.aot()
    machine = {"device": device.name, "count": 1, "per_node": nodes.per_node}
    machines.append(tomlkit.item(machine))
    document["nodes"] = machines

    # A device of the table needs no data sheet in the file.
    if DEVICES.get(device.name) != device:
        document["devices"] = {device.name: _rounded(device, leave=("name",))}

    # The efficiencies, and the software for which they hold.
    document["efficiency"] = {device.name: _rounded(nodes.efficiency)}

    assert nodes.measured is not None
    place = f"{datetime.date.today()}, {nodes.per_node} devices of {platform.node()}"
    versions = f"torch {torch.__version__}, hybridflow {version('hybridflow')}"
    measured = {
        **attrs.asdict(nodes.measured),
        "on": f"{place}, {versions}",
        "error": float(f"{abs(found.errors()).mean():.2g}"),
    }
    document["measured"] = {device.name: measured}
    return tomlkit.dumps(document)


def _rounded(values: Any, leave: Sequence[str] = ()) -> dict[str, float]:
    """Return the numbers of an attrs instance with DIGITS digits, without those in `leave`."""
    numbers = attrs.asdict(
        values, filter=lambda field, value: field.name not in leave and value is not None
    )
    return {
        key: float(f"{value:.{DIGITS}g}") if value > 1e-6 else 0.0 for key, value in numbers.items()
    }
