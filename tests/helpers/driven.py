"""A run whose steps are taken as the controller takes them, without its reports."""

from __future__ import annotations

import attrs

from hybridflow.core.controller import checkpoint, restore
from hybridflow.core.running.checkpoint import checkpoints_of
from hybridflow.core.running.pages import Pages
from hybridflow.core.running.run import Run
from hybridflow.core.running.saving import Saving
from hybridflow.kit.testing.runs import TinyRun


def write_checkpoint(run: Run, pages: Pages) -> None:
    """A checkpoint of the present step, which is complete when this returns."""
    saving = Saving(run)
    checkpoint(run, pages, saving)
    saving.finish()


class Driven:
    """Takes the steps of a TinyRun as the controller does, with a hook at each step's end."""

    def __init__(
        self, tiny: TinyRun, steps: int, at_end=lambda run: True, pages=Pages, resume=False
    ):
        """Resume: go on from the newest checkpoint in the run's folder."""
        job = attrs.evolve(tiny.job, run=attrs.evolve(tiny.job.run, steps=steps))
        self.run = Run(job, tiny.session, tiny.ctx, checkpoints_of(job))
        self.metrics, self.said, self.rows, self.traffic = [], [], [], []
        self.at_end = at_end
        kept = restore(self.run, tiny.algorithm, self.said.append) if resume else None
        self.pages = pages(self.run, tiny.algorithm, self.end, self.said.append)
        if kept is not None:
            self.pages.go_on(kept)
        self.pages.publish()
        self.pages.all()

    def end(self, page) -> bool:
        metrics = self.pages.finish(page)
        self.run.step = page.step
        self.metrics.append(metrics.values())
        self.rows.append(page.recorded(metrics))
        self.traffic.append(page.traffic.take())
        self.pages.publish()
        return self.at_end(self.run) and self.run.step < self.run.job.run.steps
