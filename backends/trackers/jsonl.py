"""metrics.jsonl: one JSON object per step."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from hybridflow.core.contracts.tracker import Tracker


class JsonlTracker(Tracker):
    """Appends {"step": ..., metric: value, ...}; flushed line by line."""

    def start(self, folder: Path, step: int) -> None:
        path = folder / "metrics.jsonl"
        if path.exists():
            kept = [
                line
                for line in path.read_text().splitlines(keepends=True)
                if _step_of(line) <= step
            ]
            partial = path.with_suffix(".partial")
            partial.write_text("".join(kept))
            os.replace(partial, path)
        self.file: IO[str] = open(path, "a")  # noqa: SIM115

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.file.write(json.dumps({"step": step, **metrics}) + "\n")
        self.file.flush()

    def close(self) -> None:
        self.file.close()


def _step_of(line: str) -> float:
    """The line's step; a line that a killed run left half written counts as later than any."""
    try:
        return json.loads(line)["step"] if line.endswith("\n") else float("inf")
    except (ValueError, KeyError, TypeError):
        return float("inf")
