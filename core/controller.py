"""The training loop of one job.

    run_job          claims the run's folder; starts again if a worker dies
      train          starts processes, builds the models, restores the newest checkpoint
        every step   algorithm.step(ctx) -> metrics -> validation if due -> checkpoint if due
                     (core/running/pages.py has their order where steps are generated ahead)
      keep           writes a checkpoint, and the trained models as Hugging Face folders

The dataflow of a step, here PPO's with one update per response: the verbs that `algorithm.step`
calls, and behind them what the loop does. A call returns at once, but for a sync to engines in a
pool of their own, and where the number of fresh prompts or the units of a loss are needed first.
The calls of one row run at the same time where their roles have pools of their own. Arrows are
batches, whose columns stay on the ranks until a rank reads them.

    ctx.prompts                                                       data
         |
    ctx.actor.generate                                                step stage: generation
         |
         +--------------------+--------------------+
         |                    |                    |
    ctx.reward.score    ctx.ref.logprobs    ctx.critic.values         step stage: inference
         |                    |                    |
         +--------------------+--------------------+
         |
    ctx.compute(advantages)
         |
    ctx.minibatches ----------+
         |                    |
    ctx.actor.update    ctx.critic.update                             step stage: training
         |                    |
         +--------------------+
         |
    ctx.finish -> Metrics -> Reporter.step -> console, trackers
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from hybridflow.core.contracts.observer import Observer
from hybridflow.core.errors import (
    CheckpointError,
    DamagedError,
    MismatchError,
    WorkerDied,
    WorkerError,
)
from hybridflow.core.job.job import Job
from hybridflow.core.plugins import registry
from hybridflow.core.running import supervised
from hybridflow.core.running.checkpoint import State, checkpoints_of
from hybridflow.core.running.failures import check_failed
from hybridflow.core.running.folder import StopRequested, StopSignal, claim, write_mark
from hybridflow.core.running.mismatch import explained
from hybridflow.core.running.pages import Kept, Page, Pages, read_kept
from hybridflow.core.running.reporting import Reporter
from hybridflow.core.running.run import Run
from hybridflow.core.running.saving import Saving
from hybridflow.core.running.session import Prepared, Session
from hybridflow.core.running.validation import validate_if_due
from hybridflow.core.running.watchdog import Watchdog
from hybridflow.core.values.files import DONE


@attrs.frozen
class RunOutcome:
    """How a run ended."""

    state: str
    """"finished", or "stopped": SIGTERM arrived, and the newest checkpoint is to go on from."""
    step: int
    """Number of completed training steps."""
    validations: dict[int, dict[str, float]]
    """Step -> metrics of the validation after it."""
    asked: bool = False
    """Whether SIGTERM arrived, though perhaps too late for this run."""


def run_job(
    job: Job,
    prepared: Prepared,
    resume: bool = False,
    overwrite: bool = False,
    export: bool = False,
    mark: Mapping[str, Any] | None = None,
    observers: Sequence[Observer] = (),
) -> RunOutcome:
    """Run one job to its end.

    resume: go on from the newest checkpoint in the run's folder; overwrite: remove an earlier run
    from the folder; export: write the trained models at the end; mark: further entries of the
    folder's run.json, beside the config and versions; observers: shown each step.

    When a worker dies, the job starts again from its newest checkpoint (from the beginning if there
    is none), up to run.restarts times; the next WorkerDied is raised. Any other error ends the run,
    since it would happen again. Raises ConfigError if the run's folder cannot be claimed.
    """
    mark = mark or {}
    with claim(job, resume, overwrite), Reporter(job, prepared, observers) as report:
        if not resume:
            write_mark(job, mark)
        supervised.tell("begun")
        (job.folder / DONE).unlink(missing_ok=True)  # of a finished run that goes on
        for attempt in range(job.run.restarts + 1):
            stop = StopSignal()
            try:
                session = Session(job, prepared, report.say)
                return train(session, report, stop, resume or attempt > 0, export, mark)
            except StopRequested:
                return _stopped(job, report, "told to stop while it started")
            except WorkerDied as error:
                if stop.requested:
                    return _stopped(job, report, f"{error.message}\ntold to stop meanwhile")
                if attempt == job.run.restarts:
                    raise

                report.say(
                    f"{error.message}\n"
                    f"restart {attempt + 1} of {job.run.restarts}, from the newest checkpoint "
                    "(step 0 if there is none)"
                )
    raise AssertionError("unreachable")


def _stopped(job: Job, report: Reporter, why: str) -> RunOutcome:
    """Return the outcome of a run that was told to stop, and cannot write a checkpoint."""
    step = max(checkpoints_of(job).steps(), default=0)
    stands = f"the checkpoint of step {step} stands" if step else "nothing was trained"
    report.say(f"{why}: {stands}; go on with --resume")
    return RunOutcome("stopped", step, {})


def train(
    session: Session,
    report: Reporter,
    stop: StopSignal,
    resume: bool,
    export: bool,
    mark: Mapping[str, Any],
) -> RunOutcome:
    """Train until run.steps, until the goal of the validation, or until SIGTERM asks for a stop."""
    job = session.job
    algorithm = type(job.algorithm)(job.algorithm.config)  # a restart begins with fresh state
    checkpoints = checkpoints_of(job)

    watchdog = Watchdog(job.run, job.folder, session.runtime, report.say, stop)
    with stop, watchdog, session, watchdog.guarding():
        # A new run begins at step 0; a resumed one after the step of its last checkpoint.
        run = Run(job, session, session.context(), checkpoints)
        watchdog.step = lambda: run.step
        ahead = None
        if resume and checkpoints.steps():
            ahead = restore(run, algorithm, report.say)
        if resume:
            # Settings that its checkpoint does not fit are not to be taken for the run's.
            write_mark(job, mark)
        report.begin(run.step, session.parameters)
        report.observe(run)

        def end(page: Page) -> bool:
            """End a step, all calls of which are on their way; return whether the run goes on."""
            metrics = pages.finish(page)
            run.step = page.step
            with pages.charged(page):
                values = report.step(run, metrics, time.perf_counter() - page.began)
            report.samples(run.step, page.recorded(metrics))
            check_failed(job, run.step, metrics)
            pages.publish()
            registry().notify("hybridflow_step_end", run=run, step=run.step, metrics=values)

            # The validation comes first, so that the checkpoint contains its metrics.
            validate_if_due(run, report)
            stopping = stop.requested
            saving.look()
            if saving.due(run.step) or stopping:
                report.checkpoint(run.step)
                checkpoint(run, pages, saving)
            return run.step < job.run.steps and not run.reached and not stopping

        saving = Saving(run)
        pages = Pages(run, algorithm, end, report.say)
        if ahead is not None:
            pages.go_on(ahead)
        try:
            pages.publish()
            validate_if_due(run, report)
            stop.begin()
            watchdog.begin()
            if run.step < job.run.steps and not run.reached:
                pages.all()
        except MismatchError as error:
            raise explained(error, run.step + 1, run.ctx.roles[error.role]) from error

        if run.step < job.run.steps and not run.reached:
            saving.finish()
            report.say(
                f"told to stop: the checkpoint of step {run.step} is written; go on with --resume"
            )
            return RunOutcome("stopped", run.step, run.validations)

        # run.steps are completed, or the goal is reached.
        validate_if_due(run, report, ended=True)
        report.checkpoint(run.step)
        keep(run, pages, saving, export)
        report.ended()
        return RunOutcome("finished", run.step, run.validations, stop.requested)


def keep(run: Run, pages: Pages, saving: Saving, export: bool) -> None:
    """Write the last step's checkpoint, if there should be one, and export the models."""
    failure = None
    try:
        saving.finish()
        if run.job.run.final_checkpoint and run.step not in run.checkpoints.steps():
            checkpoint(run, pages, saving)
            saving.finish()
    except CheckpointError as error:
        failure = error

    # The disk may have enough space for the models only.
    if export:
        run.session.export(run.job.folder)
    if failure is not None:
        raise failure


def checkpoint(run: Run, pages: Pages, saving: Saving) -> None:
    """Begin to write the whole state of the run, from which it resumes bit for bit."""
    before = pages.before()
    state = State(
        step=run.step,
        algorithm=before.algorithm,
        counters=before.counters,
        data=before.data,
        validations=dict(run.validations),
        tokens=run.tokens,
    )
    saving.begin(state, pages.keep)


def restore(run: Run, algorithm, say: Callable[[str], None]) -> Kept | None:
    """Load the newest checkpoint that is not damaged into the run, its workers and the algorithm.

    Return what it has of later steps, with run.max_staleness. Newer ones are set aside. Raises
    CheckpointError where all are damaged, and where they are those of another model.
    """
    damaged: dict[int, str] = {}
    for step in reversed(run.checkpoints.steps()):
        try:
            state = run.checkpoints.read(step)
            # The weights' version is loaded too; engines have none yet: the next generate syncs.
            run.session.load(run.checkpoints.path(step))
            kept = None
            if state.ahead is not None and run.job.run.max_staleness:
                kept = read_kept(run, run.checkpoints.path(step), state.ahead)
        except DamagedError as error:
            damaged[step] = error.message if isinstance(error, WorkerError) else str(error)
            continue
        break
    else:
        listed = "".join(f"\n  step {step}: {text}" for step, text in damaged.items())
        raise CheckpointError(
            f"no checkpoint in {run.checkpoints.folder} can be read; put back a copy of one, or "
            f"begin anew with --overwrite:{listed}"
        )
    for step, text in damaged.items():
        aside = run.checkpoints.set_aside(step)
        say(
            f"the checkpoint of step {step} is damaged, and is now {aside}: {text}\n"
            f"going on from step {state.step}"
        )

    run.session.data.set_state(state.data).result()
    algorithm.load_state_dict(state.algorithm)
    run.ctx.counters = state.counters
    run.validations = state.validations
    run.step = state.step
    run.tokens = state.tokens
    return kept
