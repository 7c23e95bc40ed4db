"""A step of an inline run beside busy loops: at most three times as long as alone; a fair share is twice.

    python bench/busy.py [--rounds 3]

The demo's second stage runs on two threads in a process of its own, alone and beside one busy loop per core, in turns.
The median seconds of a step are compared. With `--spin` the threads spin while they wait (runtime.spin = true), which
shows what that costs; then no bar holds.
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

LOOPS = 2
BAR = 3.0
STEPS = 12
WARM_UP = 3
"""Steps at the start of a run that do not count."""


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


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--spin", action="store_true", help="threads spin while they wait; no bar")
    given = parser.parse_args()

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
