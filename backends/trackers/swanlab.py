"""Tracker "swanlab" (the extra `swanlab`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import swanlab

from hybridflow.backends.trackers.config import SwanLabConfig
from hybridflow.core.contracts.observer import SampleRow
from hybridflow.core.contracts.tracker import Tracker
from hybridflow.kit.tracking import is_due, remembered_id, run_facts, sample_table


class SwanLabTracker(Tracker):
    """A plugin of kind "tracker", name "swanlab".

    A resumed run that is online goes on with the same one. Offline each start has a folder of its
    own, which SwanLab sends as a run of its own; steps after the checkpoint are in both.
    """

    Config: ClassVar[type] = SwanLabConfig

    def start(self, folder: Path, step: int) -> None:
        """Begin or go on with a run."""
        config = self.config
        facts = run_facts(folder, config)
        own, again = remembered_id(folder, "swanlab", step)
        online = config.mode in (None, "online")
        self.run: Any = swanlab.init(
            mode=config.mode,
            workspace=config.workspace,
            project=config.project,
            name=facts.name,
            group=config.group,
            tags=list(config.tags),
            config={**facts.config, "origin": facts.origin},
            log_dir=str(folder / "swanlab"),
            id=own if online else None,
            resume="allow" if online and again else None,
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step."""
        self.run.log(dict(metrics), step=step)

    def samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        """Record a table, `samples/train` or that of a validation."""
        if is_due(self.config.samples_every, step, rows):
            titles, cells = sample_table(rows)
            table = swanlab.echarts.Table()
            table.add(titles, cells)
            self.run.log({f"samples/{rows[0]['data']}": table}, step=step)

    def close(self) -> None:
        """Send what is left, and finish."""
        self.run.finish()
