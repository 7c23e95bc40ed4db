"""A run in a process of its own, beside which a test does things to its processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

from helpers.tiny import metrics
from hybridflow.core.processes.look import Look, looks

START_S = 120.0
"""Seconds within which a run must get somewhere."""


class WatchedRun:
    """The config tiny.toml of a folder, run there by the command; used as a context manager."""

    def __init__(self, folder: Path, *settings: str):
        self.folder = folder
        self.kept = folder / "runs/tiny"
        self.file = folder / "out.txt"
        self.command = [sys.executable, "-m", "hybridflow.cli.main", "run", "tiny.toml", *settings]

    def __enter__(self) -> WatchedRun:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "1000"}
        with self.file.open("w") as out:
            self.process = subprocess.Popen(
                self.command, cwd=self.folder, env=environment, stdout=out, stderr=out
            )
        return self

    def __exit__(self, *error) -> None:
        self.process.kill()
        self.process.wait()

    @property
    def output(self) -> str:
        return self.file.read_text()

    def until(self, condition, seconds: float = START_S):
        """What the condition says once it holds, while the run goes on."""
        deadline = time.monotonic() + seconds
        while not (found := condition()):
            assert self.process.poll() is None and time.monotonic() < deadline, self.output
            time.sleep(0.05)
        return found

    def steps(self, count: int) -> None:
        """Wait until so many steps are completed."""
        file = self.kept / "metrics.jsonl"
        self.until(lambda: file.exists() and len(file.read_text().splitlines()) >= count)

    def said(self, pattern: str, seconds: float = START_S) -> re.Match:
        """Wait until the run has said something; return the match."""
        return self.until(lambda: re.search(pattern, self.output), seconds)

    def look(self, name: str) -> Look:
        """What one of its processes does, by its name."""

        def found():
            return [one for one in looks(self.kept / "processes") if one.name == name]

        return self.until(found)[0]

    def ends(self, seconds: float = START_S) -> int:
        """Wait for its end; return the exit status."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it does not end:\n{self.output}") from None

    @property
    def last_step(self) -> int:
        return metrics(self.kept)[-1]["step"]
