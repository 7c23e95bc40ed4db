"""What benchmarks share: one JSON object per line, rounds taken in turns, peers in their own venvs.

The machine may be shared, so times are taken in turns and compared as paired ratios.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def emit(
    name: str, value: float, unit: str, *, ratio: float | None = None, against: str | None = None,
    bar: float | None = None, at_most: bool = False,
) -> bool:  # fmt: skip
    """Print a figure; give whether its bar is met: `ratio` (or `value` without one) at least `bar`, or at most."""
    line: dict[str, object] = {"name": name, "value": _round(value), "unit": unit}
    if ratio is not None:
        line |= {"ratio": _round(ratio), "against": against}
    met = True
    if bar is not None:
        measured = value if ratio is None else ratio
        met = measured <= bar if at_most else measured >= bar
        line |= {"bar": bar, "met": met}
    print(json.dumps(line), flush=True)
    return met


def _round(value: float) -> float:
    return float(f"{value:.4g}")


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
