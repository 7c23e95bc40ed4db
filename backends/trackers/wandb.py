"""Tracker "wandb": Weights & Biases (the extra `wandb`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import wandb

from hybridflow.backends.trackers.config import WandbConfig
from hybridflow.core.contracts.observer import SampleRow
from hybridflow.core.contracts.tracker import Tracker
from hybridflow.kit.tracking import is_due, remembered_id, run_facts, sample_table


class WandbTracker(Tracker):
    """A plugin of kind "tracker", name "wandb".

    A resumed run goes on with the same id. W&B takes no steps back: those after the checkpoint are
    there twice, the later ones last, over the metric `step`.
    """

    Config: ClassVar[type] = WandbConfig

    def start(self, folder: Path, step: int) -> None:
        """Begin or go on with a run, whose files are in the run's folder."""
        config = self.config
        facts = run_facts(folder, config)
        own, again = remembered_id(folder, "wandb", step)
        self.run: Any = wandb.init(
            entity=config.entity,
            project=config.project,
            name=facts.name,
            group=config.group,
            tags=list(config.tags),
            config={**facts.config, "origin": facts.origin},
            id=own,
            resume="allow" if again else None,
            mode=config.mode,
            dir=str(folder),
            settings=wandb.Settings(console="off", silent=True),
        )
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step."""
        self.run.log({"step": step, **metrics})

    def samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        """Record a table, `samples/train` or that of a validation."""
        if is_due(self.config.samples_every, step, rows):
            titles, cells = sample_table(rows)
            table = wandb.Table(columns=titles, data=cells)
            self.run.log({"step": step, f"samples/{rows[0]['data']}": table})

    def close(self) -> None:
        """Send what is left, and finish."""
        self.run.finish()
