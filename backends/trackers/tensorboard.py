"""Tracker "tensorboard": writes event files to `tensorboard/` in the run's folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from hybridflow.core.contracts.tracker import Tracker
from hybridflow.core.values.files import TENSORBOARD


class TensorBoardTracker(Tracker):
    """A plugin of kind "tracker", name "tensorboard". Each metric is a scalar of its name."""

    def start(self, folder: Path, step: int) -> None:
        """Open an event file; tell TensorBoard to hide earlier events of steps after `step`.

        Each attempt of a run has an event file of its own; TensorBoard shows them as one.
        """
        # purge_step is the first step to hide.
        self.writer = SummaryWriter(str(folder / TENSORBOARD), purge_step=step + 1)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a scalar per metric."""
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is buffered, and close the file."""
        self.writer.close()
