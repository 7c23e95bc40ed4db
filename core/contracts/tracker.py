"""The contract of trackers: where metrics are written."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar


class Tracker(ABC):
    """A plugin of kind "tracker". It lives on the controller."""

    Config: ClassVar[type | None] = None
    """Its settings, a frozen attrs class; they stand beside its name in run.trackers. None: it has
    no settings."""

    def __init__(self, config: Any = None):
        """`config`: an instance of its Config."""
        self.config = config

    @abstractmethod
    def start(self, folder: Path, step: int) -> None:
        """Begin to write into the run's folder.

        A resumed run continues after `step`: what was logged of later steps is removed.
        """

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step."""

    def close(self) -> None:  # noqa: B027
        """Finish: the run is over."""
