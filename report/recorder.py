"""Records a run's samples and its timeline, in the folder `recording` of the run."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from hybridflow.core.contracts.observer import Observer, SampleRow, Span
from hybridflow.core.job.job import Job
from hybridflow.core.values.files import RECORDING, REPORT
from hybridflow.kit.recording import MEMORY, SAMPLES, TIMELINE, RecordedTable

FLUSH_S = 20.0
"""Seconds after which what was taken is written, so that who watches a run sees it."""
MB = 1_000_000


class RunRecording(Observer):
    """Writes the tables `samples` and `timeline` of a run."""

    def __init__(self, job: Job):
        run = job.run
        every = max(job.validation.every, 1) if job.validation else 1

        def place(row: SampleRow) -> int:
            # Validations are thinned out by themselves.
            return row["step"] - 1 if row["data"] == "train" else row["step"] // every

        self.samples_table = RecordedTable(job.folder, SAMPLES, run.samples_mb * MB, place)
        self.timeline_table = RecordedTable(job.folder, TIMELINE, run.timeline_mb * MB)
        self.job = job
        self._flushed = time.monotonic()
        self._begun = False

    def begin(self, run: Any) -> None:
        self._begun = True
        for table in (self.samples_table, self.timeline_table):
            if table.most_bytes:
                table.begin(run.step)
        estimates = [
            {
                "pool": pool.pool,
                "usable": pool.usable,
                "needed": pool.needed,
                "when": pool.when,
                "parts": dict(pool.parts),
                "phases": dict(pool.phases),
            }
            for pool in run.session.memory
        ]
        file = self.job.folder / RECORDING / MEMORY
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(estimates, indent=2) + "\n")

    def samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        if self.samples_table.most_bytes:
            self.samples_table.add(rows)

    def spans(self, step: int, spans: Sequence[Span]) -> None:
        if self.timeline_table.most_bytes:
            self.timeline_table.add([{"step": step, **_fields(span)} for span in spans])

    def step(self, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Write what was taken, if that is due."""
        if time.monotonic() - self._flushed >= FLUSH_S:
            self._flush()
        return {}

    def checkpoint(self, step: int) -> None:
        self._flush()

    def ended(self) -> Iterable[str]:
        """Write the run's report; return where it is."""
        return [f"what happened: {self._report('finished')}"] if self.job.run.report else ()

    def close(self) -> None:
        """Write what was taken; of a run that has failed or was stopped, a report too."""
        self._flush()
        if self._begun and self.job.run.report:
            self._report("ended")

    def _report(self, state: str) -> Path:
        from hybridflow.report.building import write_report

        self._begun = False
        self._flush()
        return write_report([self.job.folder], self.job.folder / REPORT, state)

    def _flush(self) -> None:
        self._flushed = time.monotonic()
        self.samples_table.flush()
        self.timeline_table.flush()


def _fields(span: Span) -> dict[str, Any]:
    return {field.name: getattr(span, field.name) for field in attrs.fields(Span)}
