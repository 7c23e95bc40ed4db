"""Checkpoints: each is complete or absent, and the newest few are kept.

A checkpoint is written to partial-step-N and renamed when it is complete:

    checkpoints/
      step-00000010/
        state.json    step, algorithm, counters, data position, validations
        actor/        weights and optimizer, as the training backend writes them
        critic/
      partial-step-00000020/    being written, or left by a process that was killed
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from hybridflow.core.errors import CheckpointError, WorkerDied
from hybridflow.core.values.files import CHECKPOINTS

if TYPE_CHECKING:
    from hybridflow.core.job.job import Job

PREFIX = "step-"
FORMAT = 2
"""Version of a checkpoint's files; checkpoints of another format are refused."""


@attrs.frozen
class Checkpoints:
    """The checkpoints of a run in `folder`, of which the newest `keep` are kept."""

    folder: Path
    keep: int

    def steps(self) -> list[int]:
        """Return the steps with a complete checkpoint, in order."""
        if not self.folder.is_dir():
            return []

        # A folder is a checkpoint once it has its state.json.
        steps = []
        for path in self.folder.iterdir():
            digits = path.name.removeprefix(PREFIX)
            if not (path.name.startswith(PREFIX) and digits.isdigit()):
                continue
            if (path / "state.json").is_file():
                steps.append(int(digits))
        return sorted(steps)

    def path(self, step: int) -> Path:
        """Return the folder of the checkpoint of `step`, which may not exist."""
        return self.folder / f"{PREFIX}{step:08d}"

    def write(self, step: int, state: dict[str, Any], save: Any) -> Path:
        """Write `state` as JSON and the models by `save(folder)`; return the checkpoint's folder.

        After a failure earlier checkpoints are unchanged. Raises CheckpointError with the cause (a
        full disk, say), and WorkerDied if a worker died while it wrote.
        """
        final = self.path(step)
        partial = final.with_name(f"partial-{final.name}")
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            save(partial)

            # state.json comes last and reaches the disk before the rename that completes it all.
            with open(partial / "state.json", "w") as file:
                json.dump({"format": FORMAT, **state}, file)
                file.flush()
                os.fsync(file.fileno())

            # A rename is all or nothing. One of the same step, from before a restart, makes way.
            if final.exists():
                shutil.rmtree(final)
            partial.rename(final)
        except WorkerDied:  # the job starts again, from the checkpoint before
            shutil.rmtree(partial, ignore_errors=True)
            raise
        except Exception as error:
            # The cause may be a full disk, so the incomplete one is removed at once.
            shutil.rmtree(partial, ignore_errors=True)
            steps = self.steps()
            earlier = "there is no earlier one"
            if steps:
                earlier = f"the checkpoint of step {steps[-1]} is whole"
            raise CheckpointError(
                f"the checkpoint of step {step} could not be written to {self.folder}: {error}; "
                f"{earlier}. Free disk space or change run.folder, and go on with --resume"
            ) from error

        # Older ones are removed only when the new one is complete.
        for old in self.steps()[: -self.keep]:
            shutil.rmtree(self.path(old), ignore_errors=True)
        return final

    def read(self, step: int) -> dict[str, Any]:
        """Return the `state` that was passed to `write`.

        Raises CheckpointError for a file that cannot be read and for another format.
        """
        path = self.path(step)
        try:
            state = json.loads((path / "state.json").read_text())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"the checkpoint {path} cannot be read: {error}") from error

        # The oldest checkpoints have no format number.
        number = state.get("format") if isinstance(state, dict) else None
        if number != FORMAT:
            writer = "an older" if number is None else "another"
            raise CheckpointError(
                f"the checkpoint {path} was written by {writer} hybridflow "
                f"(format {number}, this one reads {FORMAT}); go on with the version that run.json "
                "names, or begin anew with --overwrite"
            )
        return state


def checkpoints_of(job: Job) -> Checkpoints:
    """Return the checkpoints in the run's folder."""
    return Checkpoints(job.folder / CHECKPOINTS, job.run.keep_checkpoints)
