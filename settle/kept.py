"""Results of a finished run in its folder: outcome, checkpoint to resume from, trained models."""

from __future__ import annotations

import attrs

from hybridflow.core.errors import ConfigError, DamagedError
from hybridflow.core.job.job import Job
from hybridflow.core.running.checkpoint import checkpoints_of
from hybridflow.core.running.exports import CONFIG, export_folder
from hybridflow.core.running.run import goal_reached
from hybridflow.core.values.files import (
    CHECKPOINTS,
    CONSOLE,
    DONE,
    FORK,
    JOURNAL,
    LOCK,
    LOGS,
    MARK,
    PARTIAL_EXPORT,
    PROCESSES,
    REPORT,
    TRACE,
)
from hybridflow.core.values.sealed import PARTIAL, read_sealed, write_sealed


@attrs.frozen
class Done:
    """How a run ended."""

    step: int
    """Number of training steps."""
    validations: dict[int, dict[str, float]]
    """Step -> metrics of the validation after it."""
    exported: bool
    """Whether the trained models are written."""


def write_done(job: Job, done: Done) -> None:
    """Write to the run's folder that the run is finished, and how."""
    write_sealed(job.folder / DONE, attrs.asdict(done))


def read_done(job: Job) -> Done | None:
    """Return how the run ended; None for one that has not.

    Raises ConfigError for a damaged file.
    """
    file = job.folder / DONE
    if not file.is_file():
        return None
    try:
        record = read_sealed(file)
        by_step = record.pop("validations").items()
        return Done(validations={int(step): values for step, values in by_step}, **record)
    except (DamagedError, AttributeError, KeyError, TypeError, ValueError) as error:
        what = f"{file} does not say how a run ended"
        if isinstance(error, DamagedError):
            what = str(error)
        raise ConfigError(
            f"{what}. Put back a copy, or remove it: --resume goes on then from the last checkpoint"
        ) from error


NO_RESULTS = (
    *(MARK, LOCK, CONSOLE, LOGS, PROCESSES, JOURNAL, CHECKPOINTS),
    *(FORK, PARTIAL_EXPORT, REPORT, TRACE),
)
"""Names in a run's folder that are no results: a run that begins anew may replace or keep them."""


def results_of(job: Job) -> list[str]:
    """Return the names in the run's folder, without checkpoints, journal, logs, lock and marks."""
    if not job.folder.is_dir():
        return []
    names = sorted(path.name for path in job.folder.iterdir())
    return [name for name in names if name not in NO_RESULTS and not name.endswith(PARTIAL)]


def to_train(job: Job, done: Done) -> bool:
    """Return whether the present config has more steps, or a higher goal, than the finished run."""
    return done.step < job.run.steps and not goal_reached(job, done.validations)


def to_export(job: Job, done: Done, export: bool) -> bool:
    """Return whether `export` is set and models are not exported yet, or were removed."""
    complete = all((export_folder(job.folder, name) / CONFIG).is_file() for name in job.trained)
    return export and not (done.exported and complete)


def kept(job: Job) -> str:
    """Return a line on where a finished run's models are, and whether it can be resumed."""
    exports = [export_folder(job.folder, name) for name in job.trained]
    written = [str(folder) for folder in exports if (folder / CONFIG).is_file()]
    steps = checkpoints_of(job).steps()

    if written:
        model = f"the model is in {written[0]}"
        if len(written) > 1:
            model = f"the models are in {', '.join(written)}"
        if steps:
            done = read_done(job)
            reached = done is not None and goal_reached(job, done.validations)
            more = "a higher validation.stop_at" if reached else "more run.steps"
            return f"{model}; --resume with {more} goes on from step {steps[-1]}"
        return f"{model}; there is no checkpoint to go on from"
    if steps:
        return (
            f"no model is exported; --resume run.export=true writes that of step {steps[-1]} "
            f"from {job.folder / 'checkpoints'}"
        )
    return f"nothing of the model is kept: {NOTHING}"


NOTHING = "run.export and run.final_checkpoint are false"
