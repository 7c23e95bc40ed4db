"""A tracker with settings: one line a step, into a file of one's choice."""

import attrs

from hybridflow.core import Tracker


@attrs.frozen
class LedgerConfig:
    file: str
    """Where the lines go, inside the run's folder."""
    metric: str = "reward/scores"
    """What is written."""


class Ledger(Tracker):
    Config = LedgerConfig

    def start(self, folder, step):
        self.path = folder / self.config.file
        before = self.path.read_text().splitlines() if self.path.exists() else []
        self.path.write_text(
            "".join(f"{line}\n" for line in before if int(line.split()[0]) <= step)
        )

    def log(self, step, metrics):
        if self.config.metric in metrics:
            with self.path.open("a") as file:
                file.write(f"{step} {metrics[self.config.metric]}\n")
