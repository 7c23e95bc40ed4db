"""Tracker "tensorboard": writes event files to `tensorboard/` in the run's folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from torch.utils.tensorboard import SummaryWriter

from hybridflow.backends.trackers.config import TensorBoardConfig
from hybridflow.core.contracts.observer import SampleRow
from hybridflow.core.contracts.tracker import Tracker
from hybridflow.core.values.files import TENSORBOARD
from hybridflow.kit.tracking import is_due, sample_table


class TensorBoardTracker(Tracker):
    """A plugin of kind "tracker", name "tensorboard".

    Each metric is a scalar of its name; samples are tables among the texts.
    """

    Config: ClassVar[type] = TensorBoardConfig

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

    def samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        """Write a table in Markdown, `samples/train` or that of a validation."""
        if is_due(self.config.samples_every, step, rows):
            titles, cells = sample_table(rows)
            lines = [titles, ["---"] * len(titles), *cells]
            text = "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)
            self.writer.add_text(f"samples/{rows[0]['data']}", text, step)

    def close(self) -> None:
        """Write what is buffered, and close the file."""
        self.writer.close()


def _cell(value: Any) -> str:
    """Return a value as a cell of Markdown: bars and line ends would begin others."""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", "<br>")
