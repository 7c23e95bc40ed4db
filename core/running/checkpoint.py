"""Checkpoints: each is complete or absent, and the newest few are kept.

A checkpoint is written to partial-step-N and renamed when it is complete:

    checkpoints/
      step-00000010/
        state.json    step, algorithm, counters, data position, validations
        ahead-0.npz   with run.max_staleness: what is generated of the next step, a file per call;
                      carried-actor.npz: of the next steps, where engines and training take turns
        actor/        weights and optimizer, as the training backend writes them
        critic/
      partial-step-00000020/    being written, or left by a process that was killed
      damaged-step-00000015/    found damaged by a --resume, which took an older one
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from hybridflow.core.errors import CheckpointError, DamagedError, WorkerDied
from hybridflow.core.processes.page import moved
from hybridflow.core.values.files import CHECKPOINTS
from hybridflow.core.values.sealed import flush_file, read_sealed, write_sealed

if TYPE_CHECKING:
    from hybridflow.core.job.job import Job

PREFIX = "step-"
DAMAGED = "damaged-"
"""Prefix of the name of a checkpoint that was found damaged."""
STATE = "state.json"
"""The file that completes a checkpoint."""
FORMAT, WITH_AHEAD = 3, 6
"""Versions of a checkpoint's files, without and with what is generated of later steps; those of
another format are refused."""


@attrs.frozen
class Ahead:
    """What the engines have generated of the steps after a checkpoint's, with run.max_staleness."""

    staleness: int
    """run.max_staleness."""
    published: dict[str, list[tuple[int, int]]]
    """Role -> (step, version of its weights after it), of the steps whose weights generated it."""
    sums: list[str]
    """For each `generate` of the next step, in order, the SHA-256 of its file; "": it has none,
    since it is made in the step's turn."""
    carried: dict[str, str]
    """Role -> the SHA-256 of the file of its responses that outlive a generation phase."""

    @staticmethod
    def file(folder: Path, call: int | str) -> str:
        """Return the path of the file of a `generate`, by number, or of a role's responses."""
        name = f"carried-{call}" if isinstance(call, str) else f"ahead-{call}"
        return str(folder.absolute() / f"{name}.npz")


@attrs.frozen
class State:
    """The state of a run beside its models."""

    step: int
    """Number of completed steps."""
    algorithm: dict[str, Any]
    """`state_dict` of the algorithm."""
    counters: dict[str, int]
    """The context's counters of what was drawn."""
    data: dict[str, Any]
    """Data set -> the state of its sampler."""
    validations: dict[int, dict[str, float]]
    """Step -> metrics of the validation after it."""
    tokens: int
    """Number of tokens that the actor has generated."""
    ahead: Ahead | None = None
    """What is generated of later steps already."""


@attrs.frozen
class Checkpoints:
    """The checkpoints of a run in `folder`, of which the newest `keep` are kept."""

    folder: Path
    keep: int

    def steps(self) -> list[int]:
        """Return the steps with a complete checkpoint, in order."""
        if not self.folder.is_dir():
            return []

        # A folder is a checkpoint once it has its state.
        steps = []
        for path in self.folder.iterdir():
            digits = path.name.removeprefix(PREFIX)
            if not (path.name.startswith(PREFIX) and digits.isdigit()):
                continue
            if (path / STATE).is_file():
                steps.append(int(digits))
        return sorted(steps)

    def path(self, step: int) -> Path:
        """Return the folder of the checkpoint of `step`, which may not exist."""
        return self.folder / f"{PREFIX}{step:08d}"

    def write(self, state: State, save: Callable[[Path], Ahead | None]) -> Path:
        """Write `state`, and the models by `save(folder)`; return the checkpoint's folder.

        save: returns what it has written of the step after.

        After a failure earlier checkpoints are unchanged. Raises CheckpointError with the cause (a
        full disk, say), and WorkerDied if a worker died while it wrote.
        """
        final = self.path(state.step)
        partial = final.with_name(f"partial-{final.name}")
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            ahead = save(partial)
            self._complete(attrs.evolve(state, ahead=ahead), partial)

            # A rename is all or nothing. One of the same step, from before a restart, makes way.
            if final.exists():
                shutil.rmtree(final)
            partial.rename(final)
            flush_file(self.folder)
        except WorkerDied:  # the job starts again, from the checkpoint before
            shutil.rmtree(partial, ignore_errors=True)
            raise
        except Exception as error:
            # The cause may be a full disk, so the incomplete one is removed at once.
            shutil.rmtree(partial, ignore_errors=True)
            steps = self.steps()
            earlier = "there is no earlier one"
            if steps:
                earlier = f"the checkpoint of step {steps[-1]} is complete"
            raise CheckpointError(
                f"the checkpoint of step {state.step} could not be written to {self.folder}: "
                f"{error}; {earlier}. Mend that (free disk space, say) or change run.folder, and "
                "go on with --resume"
            ) from error

        # Older ones are removed only when the new one is complete.
        for old in self.steps()[: -self.keep]:
            shutil.rmtree(self.path(old), ignore_errors=True)
        return final

    def _complete(self, state: State, folder: Path) -> None:
        """Write the state into a folder, after all other files have reached the disk."""
        for path in folder.rglob("*"):
            flush_file(path)
            moved()
        fields = attrs.asdict(state)
        if state.ahead is None:
            del fields["ahead"]
        number = FORMAT if state.ahead is None else WITH_AHEAD
        write_sealed(folder / STATE, {"format": number, **fields})

    def read(self, step: int) -> State:
        """Return the `state` that was passed to `write`.

        Raises DamagedError for a file that is not as it was written, and CheckpointError for one of
        another format.
        """
        path = self.path(step)
        fields = read_sealed(path / STATE)
        number = fields.pop("format", None)
        if number not in (FORMAT, WITH_AHEAD):
            raise CheckpointError(
                f"the checkpoint {path} was written by another hybridflow (format {number}, this "
                f"one reads {FORMAT} and {WITH_AHEAD}); go on with the version that run.json "
                "names, or begin anew with --overwrite"
            )
        try:
            # JSON turned the steps, which are keys, into strings.
            by_step = fields.pop("validations").items()
            if ahead := fields.pop("ahead", None):
                fields["ahead"] = Ahead(**ahead)
            state = State(validations={int(at): values for at, values in by_step}, **fields)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise DamagedError(f"{path / STATE} is not the state of a run: {error}") from error
        if state.step != step:
            raise DamagedError(f"{path} has the state of step {state.step}")
        return state

    def set_aside(self, step: int) -> Path:
        """Rename a damaged checkpoint, so that it is none of `steps`; return its new folder."""
        path = self.path(step)
        aside = path.with_name(f"{DAMAGED}{path.name}")
        shutil.rmtree(aside, ignore_errors=True)
        return path.rename(aside)


def checkpoints_of(job: Job) -> Checkpoints:
    """Return the checkpoints in the run's folder."""
    return Checkpoints(job.folder / CHECKPOINTS, job.run.keep_checkpoints)
