"""A step of an inline run beside busy loops: at most three times as long as alone; a fair share is twice.

    python bench/busy.py [--rounds 3]
    python bench/busy.py --quiet --rounds 9 --against FOLDER

The demo's second stage runs on two threads in a process of its own, alone and beside one busy loop per core, in turns.
The median seconds of a step are compared. With `--spin` the threads spin while they wait (runtime.spin = true), which
shows what that costs; then no bar holds.

`--quiet` measures a small step, of 128 sequences, on a machine that does nothing else: CPU seconds and wall-clock seconds
with threads that spin and with threads that spin briefly, in turns. FOLDER has another version of hybridflow (`pip install
--no-deps --target`), whose threads spin too; this version may use at most 5% more CPU seconds than that one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from common import ROOT, emit

from hybridflow.settle.config.waiting import BRIEFLY, VARIABLE

LOOPS = 2
BAR = 3.0
STEPS = 12
WARM_UP = 3
"""Steps at the start of a run that do not count."""
QUIET_BAR = 1.05
QUIET_STEPS = 46
QUIET_RUN = """
import json, statistics, sys, time
from hybridflow.core.running.reporting import Reporter
from hybridflow.settle.launch import run
report, times = Reporter.step, []
def step(self, *given):
    found = report(self, *given)
    times.append((time.process_time(), time.perf_counter()))
    return found
Reporter.step = step
run("examples/arithmetic.toml", sys.argv[1:], overwrite=True)
steps = list(zip(times[-41:], times[-40:]))
print(json.dumps([statistics.median(b[i] - a[i] for a, b in steps) for i in (0, 1)]))
"""
"""Runs the demo with the settings given, and prints CPU and wall-clock seconds of a step: medians of the last 40."""


def step_seconds(folder: str, name: str, spin: bool) -> float:
    """Run the demo's second stage by itself from random weights; return the median of its steps."""
    settings = [
        f"run.folder={folder}", f"run.name={name}", "runtime=inline", "runtime.threads=2", f"run.steps={STEPS}",
        "validation.every=100", "validation.data.limit=8", "stages.warm-up.run.steps=1", "run.trackers=['jsonl']",
        "run.final_checkpoint=false", f"runtime.spin={str(spin).lower()}",
    ]  # fmt: skip
    command = [
        sys.executable,
        "-m",
        "hybridflow.cli.main",
        "run",
        "examples/arithmetic.toml",
        *settings,
    ]
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "GOMP_"))
    }
    subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
    lines = (Path(folder) / name / "grpo" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return statistics.median(
        [row["seconds/step"] for row in rows if "seconds/step" in row][WARM_UP:]
    )


def quiet_seconds(folder: str, version: str | None, brief: bool) -> tuple[float, float]:
    """Return CPU and wall-clock seconds of a small step of the version in a folder; None: this one."""
    settings = [
        f"run.folder={folder}", "run.trackers=[]", "runtime=inline", "runtime.threads=2", "stages.warm-up.run.steps=1",
        f"stages.grpo.run.steps={QUIET_STEPS}", "stages.grpo.algorithm.prompts_per_step=16", "validation.every=1000",
        "validation.data.limit=8", f"stages.grpo.actor.optimizer.total_steps={QUIET_STEPS}",
    ]  # fmt: skip
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "GOMP_"))
    }
    # The process imports torch before it reads the settings, so the variable itself is set.
    if brief:
        environment[VARIABLE] = BRIEFLY
    if version is not None:
        environment["PYTHONPATH"] = version
    else:
        settings.append(f"runtime.spin={str(not brief).lower()}")
    done = subprocess.run(
        [sys.executable, "-c", QUIET_RUN, *settings],
        cwd=ROOT,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    cpu, wall = json.loads(done.stdout.splitlines()[-1])
    return cpu, wall


def compare_quiet(rounds: int, against: str | None) -> bool:
    """Measure in turns, print the medians, and return whether the bar is met."""
    cases: dict[str, tuple[str | None, bool]] = {"spinning": (None, False), "brief": (None, True)}
    if against is not None:
        cases["against"] = (str(Path(against).resolve()), False)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds):
            for name, case in cases.items():
                found[name].append(quiet_seconds(f"{folder}/{name}", *case))
    medians = {
        name: [statistics.median(run[i] for run in runs) for i in (0, 1)]
        for name, runs in found.items()
    }

    met = True
    to = "spinning" if against is None else "against"
    base = medians[to]
    for name, (cpu, wall) in medians.items():
        bar = QUIET_BAR if name == "spinning" and against is not None else None
        met &= emit(
            f"busy.quiet.{name}.cpu", cpu, "s", ratio=cpu / base[0], against=to, bar=bar, at_most=True
        )  # fmt: skip
        emit(f"busy.quiet.{name}.wall", wall, "s", ratio=wall / base[1], against=to)
    return met


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--spin", action="store_true", help="threads spin while they wait; no bar")
    parser.add_argument("--quiet", action="store_true", help="what a quiet step costs")
    parser.add_argument("--against", metavar="FOLDER", help="another version, for --quiet")
    given = parser.parse_args()
    if given.quiet:
        return 0 if compare_quiet(given.rounds, given.against) else 1

    alone: list[float] = []
    beside: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(given.rounds):
            alone.append(step_seconds(folder, f"alone-{number}", given.spin))
            loops = [
                subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(LOOPS)
            ]
            try:
                beside.append(step_seconds(folder, f"beside-{number}", given.spin))
            finally:
                for loop in loops:
                    loop.kill()
                    loop.wait()

    quiet = statistics.median(alone)
    busy = statistics.median(beside)
    emit("busy.alone", quiet, "s")
    bar = None if given.spin else BAR
    met = emit("busy.beside", busy, "s", ratio=busy / quiet, against="alone", bar=bar, at_most=True)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
