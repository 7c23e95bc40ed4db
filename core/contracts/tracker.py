"""The contract of trackers: where metrics go."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar


class Tracker(ABC):
    """A plugin of kind "tracker". Lives on the controller."""

    Config: ClassVar[type | None] = None
    """Its settings, a frozen attrs class; they stand beside its name in run.trackers. None: it has none."""

    def __init__(self, config: Any = None):
        """`config`: an instance of its Config."""
        self.config = config

    @abstractmethod
    def start(self, folder: Path, step: int) -> None:
        """Write into the run's folder; a resumed run goes on after `step`, and what was logged of later steps goes."""

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keep the metrics of a step."""

    def close(self) -> None:  # noqa: B027
        """The run is over."""
