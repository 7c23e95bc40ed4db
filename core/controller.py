"""The loop: load, place, then for each step draw, let the algorithm work, log, checkpoint, validate."""

from __future__ import annotations

import time

import attrs

from hybridflow.core.errors import WorkerDied
from hybridflow.core.job.job import Job
from hybridflow.core.plugins import registry
from hybridflow.core.running.checkpoint import Checkpoints
from hybridflow.core.running.folder import StopSignal, claim
from hybridflow.core.running.reporting import Reporter
from hybridflow.core.running.run import Run
from hybridflow.core.running.session import Prepared, Session
from hybridflow.core.running.validation import validate_if_due


@attrs.frozen
class Outcome:
    """How a run ended: "finished", or "stopped" (SIGTERM; a checkpoint is there)."""

    state: str
    step: int
    validations: dict[int, dict[str, float]]
    """step -> the metrics of the validation after it."""


def run_job(
    job: Job,
    prepared: Prepared,
    resume: bool = False,
    overwrite: bool = False,
    export: bool = False,
) -> Outcome:
    """Run one job to its end, restarting from its last checkpoint up to run.restarts times when a worker dies."""
    with claim(job, resume, overwrite), Reporter(job, prepared) as report:
        for attempt in range(job.run.restarts + 1):
            try:
                return train(
                    Session(job, prepared, report.say), report, resume or attempt > 0, export
                )
            except WorkerDied as error:
                if attempt == job.run.restarts:
                    raise
                report.say(
                    f"{error.message}\nrestart {attempt + 1} of {job.run.restarts}, from the last checkpoint"
                )
    raise AssertionError("unreachable")


def train(session: Session, report: Reporter, resume: bool, export: bool) -> Outcome:
    job = session.job
    algorithm = type(job.algorithm)(job.algorithm.config)  # a restart begins with fresh state
    checkpoints = Checkpoints(job.folder / "checkpoints", job.run.keep_checkpoints)
    with session, StopSignal() as stop:
        run = Run(job, session, session.context(), checkpoints)
        if resume and checkpoints.steps():
            restore(run, algorithm)
        report.begin(run.step, session.parameters)
        validate_if_due(run, report)

        while run.step < job.run.steps and not run.reached:
            run.ctx.step = run.step + 1
            started = time.perf_counter()
            algorithm.step(run.ctx)
            metrics = run.ctx.finish()
            run.step += 1
            values = report.step(run, metrics, time.perf_counter() - started)
            registry().notify("hybridflow_step_end", run=run, step=run.step, metrics=values)

            validate_if_due(run, report)  # before the checkpoint, which so has what it found
            if due(run.step, job.run.checkpoint_every) or stop.requested:
                checkpoint(run, algorithm)
            if stop.requested and run.step < job.run.steps:
                report.say(
                    f"told to stop: the checkpoint of step {run.step} is written; go on with --resume"
                )
                return Outcome("stopped", run.step, run.validations)
        validate_if_due(run, report, ended=True)
        if export:
            session.export(job.folder)
        report.ended()
        return Outcome("finished", run.step, run.validations)


def due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def checkpoint(run: Run, algorithm) -> None:
    """Everything that a run needs to go on bit for bit."""
    state = {
        "step": run.step,
        "algorithm": algorithm.state_dict(),
        "counters": run.ctx.counters,
        "data": run.session.tasks.state().result(),
        "validations": run.validations,
    }
    folder = run.checkpoints.write(run.step, state, run.session.save)
    registry().notify("hybridflow_checkpoint", run=run, step=run.step, folder=folder)


def restore(run: Run, algorithm) -> None:
    step = run.checkpoints.steps()[-1]
    state = run.checkpoints.read(step)
    run.session.load(run.checkpoints.path(step))
    run.session.tasks.set_state(state["data"]).result()
    algorithm.load_state_dict(state["algorithm"])
    run.ctx.counters = state["counters"]
    run.validations = {int(step): values for step, values in state["validations"].items()}
    run.step = state["step"]
