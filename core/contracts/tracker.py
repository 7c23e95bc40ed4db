"""The contract of trackers: where metrics and samples are written."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from hybridflow.core.contracts.observer import SampleRow
from hybridflow.core.errors import ConfigError


class Tracker(ABC):
    """A plugin of kind "tracker". It lives on the controller."""

    Config: ClassVar[type | None] = None
    """Its settings, a frozen attrs class; they are given beside its name in run.trackers. None: it
    has no settings."""

    def __init__(self, config: Any = None):
        """`config`: an instance of its Config."""
        self.config = config

    @abstractmethod
    def start(self, folder: Path, step: int) -> None:
        """Begin to write into the run's folder.

        A resumed run continues after `step`: logged metrics of later steps are removed.
        """

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step."""

    def samples(self, step: int, rows: Sequence[SampleRow]) -> None:  # noqa: B027
        """Record rows of a step as a table, if this tracker can."""

    def checkpoint(self, step: int) -> None:  # noqa: B027
        """Put what was logged where a killed run leaves it: a checkpoint of `step` comes next."""

    def close(self) -> None:  # noqa: B027
        """Finish: the run is over."""


def remove_later_lines(path: Path, step: int) -> None:
    """Remove the lines of steps after `step` from a file of JSON objects with a "step", if any.

    Lines that a killed run left incomplete, or that are damaged, are removed too. Raises
    ConfigError where `path` is a folder.
    """
    if not path.exists():
        return
    if not path.is_file():
        raise ConfigError(f"{path}: is no file, and the run writes one of this name; move it away")
    lines = path.read_bytes().splitlines(keepends=True)
    earlier = [line for line in lines if _step_of(line) <= step]

    # Replaced in one step: a run that is killed here loses no line.
    partial = path.with_suffix(".partial")
    partial.write_bytes(b"".join(earlier))
    os.replace(partial, path)


def _step_of(line: bytes) -> float:
    """Return the line's step; infinity for a line that is incomplete or damaged."""
    # A complete line ends in a newline.
    try:
        step = json.loads(line)["step"] if line.endswith(b"\n") else None
    except (ValueError, KeyError, TypeError, RecursionError):
        step = None
    return step if isinstance(step, int) else float("inf")
