"""Tracker "jsonl": writes one JSON object per step to metrics.jsonl in the run's folder.

{"step": 1, "timestamp": 1764042070.25, "loss": 0.5, ...}
{"step": 2, "timestamp": 1764042071.5, "loss": 0.4, ...}

The time stamp is in seconds since 1970, UTC.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from hybridflow.core.contracts.tracker import Tracker, remove_later_lines
from hybridflow.core.values.files import METRICS


class JsonlTracker(Tracker):
    """A plugin of kind "tracker", name "jsonl". Each line is flushed at once."""

    def start(self, folder: Path, step: int) -> None:
        """Open the file to append to it, after removing the lines of steps later than `step`."""
        path = folder / METRICS
        remove_later_lines(path, step)

        # Left open until `close`.
        self.file: IO[str] = open(path, "a")  # noqa: SIM115

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append a line with the step, the time and the metrics."""
        self.file.write(json.dumps({"step": step, "timestamp": time.time(), **metrics}) + "\n")
        self.file.flush()  # a killed run keeps its lines

    def close(self) -> None:
        """Close the file."""
        self.file.close()
