"""What benchmarks share: one JSON object per line, rounds taken in turns, peers in their own venvs.

The machine may be shared, so times are taken in turns and compared as paired ratios.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs

ROOT = Path(__file__).resolve().parents[1]


def emit(
    name: str, value: float, unit: str, *, ratio: float | None = None, against: str | None = None,
    bar: float | None = None, at_most: bool = False, spread: Sequence[float] = (), cpu: float | None = None,
    aim: float | None = None,
) -> bool:  # fmt: skip
    """Print a figure; give whether its bar is met: `ratio` (or `value` without one) at least `bar`, or at most.

    spread: the ratio of each round, of which the least and the largest are told. cpu: processor seconds of all threads and
    processes, where `value` is seconds. aim: what is wished for and no bar.
    """
    line: dict[str, object] = {"name": name, "value": _round(value), "unit": unit}
    if cpu is not None:
        line["cpu"] = _round(cpu)
    if ratio is not None:
        line |= {"ratio": _round(ratio), "against": against}
    if spread:
        line["spread"] = [_round(min(spread)), _round(max(spread))]
    if aim is not None:
        line["aim"] = aim
    met = True
    if bar is not None:
        measured = value if ratio is None else ratio
        met = measured <= bar if at_most else measured >= bar
        line |= {"bar": bar, "met": met}
    print(json.dumps(line), flush=True)
    return met


def _round(value: float) -> float:
    return float(f"{value:.4g}")


def register_engine(name: str, path: str) -> None:
    """Install an engine for this process: engines are named by entry points, which an installed package has."""
    plugins = Path(tempfile.mkdtemp(prefix="bench-engine-"))
    atexit.register(shutil.rmtree, plugins, ignore_errors=True)
    sys.path.insert(0, str(plugins))
    info = plugins / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[hybridflow]\nrollout_engine.{name} = {path}\n")


def timed(function: Callable[[], Any]) -> float:
    """Seconds; what the function returns is dropped after the clock has stopped."""
    started = time.perf_counter()
    result = function()
    seconds = time.perf_counter() - started
    del result
    return seconds


def measured(script: str, *options: str, environment: dict[str, str] | None = None) -> Any:
    """What a script answers when it measures one thing in a process of its own: a line of JSON behind "answer "."""
    command = [sys.executable, script, *options]
    said = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    lines = [line for line in said.stdout.splitlines() if line.startswith("answer ")]
    if not lines:
        print(said.stderr[-3000:], file=sys.stderr)
        raise SystemExit(f"{' '.join(options)} failed")
    return json.loads(lines[-1].removeprefix("answer "))


def paired(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median over rounds of ours / theirs."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


MODES = {
    "1 thread": {"OMP_NUM_THREADS": "1"},
    "2 threads": {"OMP_NUM_THREADS": "2", "GOMP_SPINCOUNT": "0"},
    "2 spinning threads": {"OMP_NUM_THREADS": "2", "GOMP_SPINCOUNT": "100000"},
}
"""Ways to use two cores, as variables of a process."""
Timing = tuple[float, float]
"""Seconds, and processor seconds of all threads and processes."""
Ways = dict[str, Callable[[int], list[Timing]]]
"""Each way of one side -> a function that runs so many steps and returns the timing of each."""


@attrs.frozen
class Race:
    """Two sides, each in its best way, in turns."""

    ours: str
    """Our best way."""
    theirs: str
    """Their best way."""
    rounds: list[tuple[Timing, Timing]]
    """The median step of each round, ours and theirs."""

    @property
    def ratios(self) -> list[float]:
        """How many times as fast we are, in each round."""
        return [theirs[0] / ours[0] for ours, theirs in self.rounds]

    def medians(self, side: int) -> Timing:
        """The median round of a side, 0 ours and 1 theirs."""
        wall, cpu = zip(*(both[side] for both in self.rounds), strict=True)
        return statistics.median(wall), statistics.median(cpu)


def race(ours: Ways, theirs: Ways, rounds: int, steps: int, scout: int) -> Race:
    """Find the best way of each side in `scout` steps; then run both in turns."""
    mine, peer = (
        min(ways, key=lambda way: _median(ways[way](scout))[0]) for ways in (ours, theirs)
    )
    taken = [(_median(ours[mine](steps)), _median(theirs[peer](steps))) for _ in range(rounds)]
    return Race(mine, peer, taken)


def _median(steps: list[Timing]) -> Timing:
    wall, cpu = zip(*steps, strict=True)
    return statistics.median(wall), statistics.median(cpu)


def processes() -> dict[int, tuple[int, str, float]]:
    """Of the machine, by id: parent, start (an id may come again) and processor seconds."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            fields = stat.read_text().rpartition(")")[2].split()
            if fields[0] != "Z":
                seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
                found[int(stat.parent.name)] = (int(fields[1]), fields[19], seconds)
    return found


def family(pid: int) -> dict[tuple[int, str], float]:
    """A process and its descendants: (id, start) -> processor seconds."""
    every, members = processes(), {pid}
    while more := {p for p, (parent, _, _) in every.items() if parent in members} - members:
        members |= more
    return {(p, every[p][1]): every[p][2] for p in members if p in every}


def stamp(file: Path) -> None:
    """Add a line with the processor seconds of this process and its descendants so far."""
    with file.open("a") as lines:
        print(sum(family(os.getpid()).values()), file=lines)


def draw(
    target: str,
    lines: dict[str, dict[int, float]],
    xlabel: str,
    ylabel: str,
    *,
    beside: Any,
    base: int = 10,
) -> None:
    """Draw lines of size -> value on two logarithmic axes into a .svg or .png; `beside(axes)` draws what else belongs there."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    with pyplot.rc_context({"svg.hashsalt": "hybridflow", "font.size": 9}):
        figure, axes = pyplot.subplots(figsize=(5.2, 3), layout="constrained")
        for label, points in lines.items():
            axes.plot(list(points), list(points.values()), marker="o", markersize=3, label=label)
        beside(axes)
        axes.set_xscale("log", base=base)
        axes.set(yscale="log", xlabel=xlabel, ylabel=ylabel)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
        figure.savefig(target, metadata={"Date": None} if target.endswith(".svg") else None)


PEAK_BF16 = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12}
"""Dense bf16 FLOP/s from the data sheets, by a part of the device's name."""
REACHED = 0.8
"""The share of them that large products reach, 790e12 of an H200."""


def reachable_flops(device: str) -> float | None:
    """The bf16 FLOP/s that large products reach on a device of this name; None where it is not known."""
    return next((REACHED * flops for name, flops in PEAK_BF16.items() if name in device), None)


MINI_MODEL = [
    "actor.model.config.vocab_size=64", "actor.model.config.hidden_size=64", "actor.model.config.intermediate_size=128",
    "actor.model.config.num_hidden_layers=2", "actor.model.config.num_attention_heads=4", "run.device=cpu",
    "rollout.dtype=float32",
]  # fmt: skip
"""Overrides of examples/gpu_grpo.toml: a tiny model on the CPU."""


def device_of(mini: bool, what: str) -> str | None:
    """Return "cpu" for a mini run and "cuda" for others; None, which is told, where there is no GPU."""
    import torch

    if mini:
        torch.set_num_threads(1)
        return "cpu"
    if torch.cuda.is_available():
        return "cuda"
    print(json.dumps({"name": what, "skipped": "no CUDA device"}))
    return None


def synchronize(device: str) -> None:
    """Wait for what is queued on the device."""
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def release(device: str) -> None:
    """Give back the device's memory of what is no longer referred to."""
    import torch

    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def seconds_of(
    action: Callable[[], object], device: str, rounds: int, before: Callable[[], object] | None = None
) -> float:  # fmt: skip
    """Return the median seconds of an action, the device's work included, over rounds after one that does not count.

    before: is called before each round, and does not count.
    """
    found = []
    for _ in range(1 + rounds):
        if before is not None:
            before()
        synchronize(device)
        started = time.perf_counter()
        action()
        synchronize(device)
        found.append(time.perf_counter() - started)
    return statistics.median(found[1:])


def hybridflow(command: Sequence[str], here: bool) -> None:
    """Run a command of hybridflow, in this process if `here`; what it prints goes to stderr."""
    if here:
        from hybridflow.cli.main import main

        with contextlib.redirect_stdout(sys.stderr):
            code = main(list(command))
    else:
        whole = [sys.executable, "-m", "hybridflow.cli.main", *command]
        code = subprocess.run(whole, check=False, stdout=sys.stderr).returncode
    if code:
        raise SystemExit(f"hybridflow {' '.join(command)} ended with status {code}")


class Peer:
    """Another project in its own venv (`make bench` installs it): a process that times what it is told to.

    The script reads commands, one a line, and answers each with one line of JSON; its first line says that it is ready.
    """

    def __init__(self, venv: str, script: str, environment: dict[str, str]):
        python = ROOT / ".bench" / venv / "bin" / "python"
        if not python.exists():
            raise FileNotFoundError(f"{venv} is not installed: make .bench/{venv}/.done")
        self.process = subprocess.Popen(
            [str(python), str(ROOT / "bench" / "peers" / script)], env=environment, cwd=ROOT / ".bench" / venv,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        self._answer()

    def ask(self, command: str) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("answer "):
                return json.loads(line.removeprefix("answer "))
        raise RuntimeError(f"{self.process.args} ended with status {self.process.wait()}")

    def close(self) -> None:
        if self.process.poll() is None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
