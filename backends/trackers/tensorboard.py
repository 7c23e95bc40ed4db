"""TensorBoard event files in the run's folder `tensorboard/`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from hybridflow.core.contracts.tracker import Tracker


class TensorBoardTracker(Tracker):
    """One scalar per metric."""

    def start(self, folder: Path, step: int) -> None:
        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()
