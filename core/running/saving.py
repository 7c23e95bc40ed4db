"""Writes the checkpoints of a run beside its steps, one at a time.

begin    at a step's end: ranks copy their state, which holds training up; the run goes on
         ranks' parts reach the disk, by processes of their own (TrainingBackend.save)
look     at later steps' ends: when they have, a thread completes the checkpoint (checkpoint.py)
finish   waits for all of that: before the next one, and at the end of the run
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import attrs

from hybridflow.core.errors import WorkerDied
from hybridflow.core.plugins import registry
from hybridflow.core.processes.page import doing
from hybridflow.core.running import supervised
from hybridflow.core.running.checkpoint import Ahead, State
from hybridflow.core.running.run import Run


@attrs.define(eq=False)
class _UnderWay:
    """A checkpoint that is not complete yet."""

    state: State
    partial: Path
    asked: Callable[[], bool] | None = None
    """What returns whether the ranks' parts are on the disk, where that was asked."""
    thread: threading.Thread | None = None
    """Completes it."""
    error: Exception | None = None


class Saving:
    """The checkpoints that a run writes."""

    def __init__(self, run: Run):
        self.run = run
        self._under_way: _UnderWay | None = None
        self._began = time.monotonic()
        """When the last one was begun, or the run."""

    def due(self, step: int) -> bool:
        """Return whether a checkpoint should be written after a step."""
        section = self.run.job.run
        every, minutes = section.checkpoint_every, section.checkpoint_minutes
        if every > 0 and step % every == 0:
            return True
        if minutes > 0 and time.monotonic() - self._began >= 60 * minutes:
            return True
        validations = self.run.validations
        return step in validations and step in self.run.checkpoints.best.steps(validations)

    def begin(self, state: State, keep: Callable[[Path], Ahead | None]) -> None:
        """Have the ranks copy their state, and begin to write it.

        keep: writes what is generated of later steps into a folder. Raises CheckpointError, also
        for the checkpoint before, and WorkerDied.
        """
        self.finish()
        self._began = time.monotonic()
        checkpoints, session = self.run.checkpoints, self.run.session
        with doing(f"the checkpoint of step {state.step}"):
            try:
                partial = checkpoints.begin(state.step)
                session.save(partial)
                state = attrs.evolve(state, ahead=keep(partial))
            except WorkerDied:  # the job starts again, from the checkpoint before
                raise
            except Exception as error:
                raise checkpoints.failure(state.step, error) from error
        self._under_way = _UnderWay(state, partial)

    def look(self) -> None:
        """Go on with a checkpoint that is under way, as far as that needs no waiting."""
        one = self._under_way
        if one is None:
            return
        if one.thread is not None:
            if not one.thread.is_alive():
                self._end(one)
        elif one.asked is None:
            one.asked = self.run.session.saved(wait=False)
        elif self._answer(one):
            one.thread = threading.Thread(target=self._complete, args=(one,), daemon=True)
            one.thread.start()

    def finish(self) -> None:
        """Wait until a checkpoint that is under way is complete. Raises as `begin` does."""
        one = self._under_way
        if one is None:
            return
        with doing(f"the checkpoint of step {one.state.step}"):
            if one.thread is None:
                one.asked = self.run.session.saved(wait=True)
                self._answer(one)
                self._complete(one)
            else:
                one.thread.join()
            self._end(one)

    def _answer(self, one: _UnderWay) -> bool:
        """Return whether the ranks' parts are on the disk, as they have been asked."""
        assert one.asked is not None
        answer, one.asked = one.asked, None
        try:
            return answer()
        except WorkerDied:
            raise
        except Exception as error:
            self._under_way = None
            raise self.run.checkpoints.failure(one.state.step, error) from error

    def _complete(self, one: _UnderWay) -> None:
        try:
            self.run.checkpoints.complete(one.state, one.partial)
        except Exception as error:
            one.error = error

    def _end(self, one: _UnderWay) -> None:
        """Tell that a checkpoint is complete, or raise why it is not."""
        self._under_way = None
        step = one.state.step
        if one.error is not None:
            raise self.run.checkpoints.failure(step, one.error) from one.error
        of = f" of {self.run.job.stage}" if self.run.job.stage else ""
        supervised.tell(f"kept step {step}{of}")
        folder = self.run.checkpoints.path(step)
        registry().notify("hybridflow_checkpoint", run=self.run, step=step, folder=folder)
