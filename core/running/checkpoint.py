"""Checkpoints: each is complete or absent, and the newest few are kept, and the best.

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

import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from hybridflow.core.errors import CheckpointError, DamagedError
from hybridflow.core.processes.page import moved
from hybridflow.core.values.files import CHECKPOINTS
from hybridflow.core.values.sealed import flush_file, read_sealed, write_sealed

if TYPE_CHECKING:
    from hybridflow.core.job.job import Job

PREFIX = "step-"
PARTIAL = "partial-"
"""Prefix of the name of a checkpoint that is being written."""
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
class Best:
    """Which checkpoints are kept for their validation: the `count` best by a metric."""

    count: int
    metric: str
    highest: bool
    """Whether the highest values are the best ones."""

    def steps(self, validations: Mapping[int, Mapping[str, float]]) -> list[int]:
        """Return the steps of the best validations, the best first; of equal ones the earliest."""
        sign = -1 if self.highest else 1
        values = [
            (sign * metrics[self.metric], step)
            for step, metrics in validations.items()
            if step > 0 and not math.isnan(metrics.get(self.metric, math.nan))
        ]
        return [step for _, step in sorted(values)[: self.count]]


@attrs.frozen
class Checkpoints:
    """The checkpoints of a run in `folder`: the newest `keep` are kept, and the best."""

    folder: Path
    keep: int
    best: Best = Best(0, "", True)

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

    def begin(self, step: int) -> Path:
        """Return the folder in which the checkpoint of a step is to be written, empty."""
        # One is written at a time: others were left by a process that was killed.
        for left in self.folder.glob(f"{PARTIAL}*"):
            shutil.rmtree(left, ignore_errors=True)
        partial = self.folder / f"{PARTIAL}{self.path(step).name}"
        partial.mkdir(parents=True)
        return partial

    def complete(self, state: State, partial: Path) -> None:
        """Complete a checkpoint whose models are in the folder of `begin`; remove older ones."""
        for path in partial.rglob("*"):
            flush_file(path)
            moved()
        fields = attrs.asdict(state)
        if state.ahead is None:
            del fields["ahead"]
        number = FORMAT if state.ahead is None else WITH_AHEAD
        write_sealed(partial / STATE, {"format": number, **fields})

        # A rename is all or nothing. One of the same step, from before a restart, makes way.
        final = self.path(state.step)
        if final.exists():
            shutil.rmtree(final)
        partial.rename(final)
        flush_file(self.folder)

        # Older ones are removed only when the new one is complete.
        best = self.best.steps(state.validations)
        for old in self.steps()[: -self.keep]:
            if old not in best:
                shutil.rmtree(self.path(old), ignore_errors=True)

    def failure(self, step: int, error: Exception) -> CheckpointError:
        """Return the error for a checkpoint that could not be written; the others stand."""
        # The cause may be a full disk, so the incomplete one is removed at once.
        shutil.rmtree(self.folder / f"{PARTIAL}{self.path(step).name}", ignore_errors=True)
        steps = self.steps()
        earlier = "there is no earlier one"
        if steps:
            earlier = f"the checkpoint of step {steps[-1]} is complete"
        return CheckpointError(
            f"the checkpoint of step {step} could not be written to {self.folder}: {error}; "
            f"{earlier}. Mend that (free disk space, say) or change run.folder, and go on with "
            "--resume"
        )

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
    run = job.run
    best = Best(run.keep_best, run.best_metric, run.best_is == "highest")
    return Checkpoints(job.folder / CHECKPOINTS, run.keep_checkpoints, best)
