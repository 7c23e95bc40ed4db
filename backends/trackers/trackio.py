"""Tracker "trackio" (the extra `trackio`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import trackio

from hybridflow.backends.trackers.config import TrackioConfig
from hybridflow.core.contracts.observer import SampleRow
from hybridflow.core.contracts.tracker import Tracker
from hybridflow.kit.tracking import (
    is_due,
    plain_json,
    remembered_id,
    run_facts,
    sample_table,
)


class TrackioTracker(Tracker):
    """A plugin of kind "tracker", name "trackio".

    A run's name has its id behind it, since Trackio knows runs by their names. A resumed run goes
    on with the same one; steps after the checkpoint are there twice, the later ones last.
    """

    Config: ClassVar[type] = TrackioConfig

    def start(self, folder: Path, step: int) -> None:
        """Begin or go on with a run."""
        own, again = remembered_id(folder, "trackio", step)
        self.folder = folder
        self._open(own, again)

    def _open(self, own: str, again: bool) -> None:
        config = self.config
        facts = run_facts(self.folder, config)
        told = {key: plain_json(value) for key, value in facts.config.items()}
        self.id = own
        self.run: Any = trackio.init(
            project=config.project,
            name=f"{facts.name}-{own[:6]}",
            group=config.group,
            space_id=config.space_id,
            config={**told, "tags": list(config.tags), "origin": plain_json(facts.origin)},
            resume="allow" if again else "never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step."""
        self.run.log(dict(metrics), step=step)

    def samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        """Record a table, `samples/train` or that of a validation."""
        if is_due(self.config.samples_every, step, rows):
            titles, cells = sample_table(rows)
            table = trackio.Table(columns=titles, data=cells)
            self.run.log({f"samples/{rows[0]['data']}": table}, step=step)

    def checkpoint(self, step: int) -> None:
        """Finish, and go on: until then half a second of steps is in memory alone."""
        self.run.finish()
        self._open(self.id, again=True)

    def close(self) -> None:
        """Write what is left, and finish."""
        self.run.finish()
