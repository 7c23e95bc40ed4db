"""The contract of trackers: where metrics go."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path


class Tracker(ABC):
    """A plugin of kind "tracker". Lives on the controller."""

    @abstractmethod
    def start(self, folder: Path, step: int) -> None:
        """Write into the run's folder; a resumed run goes on after `step`, and what was logged of later steps goes."""

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None:  # noqa: B027
        """The run is over."""
