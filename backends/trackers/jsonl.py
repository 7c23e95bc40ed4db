"""Tracker "jsonl": writes one JSON object per step to metrics.jsonl in the run's folder.

{"step": 1, "loss": 0.5, ...}
{"step": 2, "loss": 0.4, ...}
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from hybridflow.core.contracts.tracker import Tracker


class JsonlTracker(Tracker):
    """A plugin of kind "tracker", name "jsonl". Each line is flushed at once."""

    def start(self, folder: Path, step: int) -> None:
        """Open the file to append to it, after removing the lines of steps later than `step`."""
        path = folder / "metrics.jsonl"
        if path.exists():
            lines = path.read_text().splitlines(keepends=True)
            earlier = [line for line in lines if _step_of(line) <= step]

            # Replaced in one step: a run that is killed here loses no line.
            partial = path.with_suffix(".partial")
            partial.write_text("".join(earlier))
            os.replace(partial, path)

        # Left open until `close`.
        self.file: IO[str] = open(path, "a")  # noqa: SIM115

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append a line with the step and its metrics."""
        self.file.write(json.dumps({"step": step, **metrics}) + "\n")
        self.file.flush()  # a killed run keeps its lines

    def close(self) -> None:
        """Close the file."""
        self.file.close()


def _step_of(line: str) -> float:
    """Return the line's step; infinity for a line that a killed run left half written."""
    # A complete line ends in a newline.
    try:
        return json.loads(line)["step"] if line.endswith("\n") else float("inf")
    except (ValueError, KeyError, TypeError):
        return float("inf")
