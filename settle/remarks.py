"""Remarks on legal settings that are probably unintended. `hybridflow show` and runs print them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hybridflow.core.contracts.planner import NotPlanned
from hybridflow.core.job.job import Job
from hybridflow.core.plugins import registry
from hybridflow.settle.changes import changes
from hybridflow.settle.placement import planner_of


def remarks(job: Job) -> Iterator[str]:
    """Yield a sentence for each legal setting that is probably unintended."""
    # Checkpoints that a run relies on, or never reaches.
    run = job.run
    if run.restarts and not (0 < run.checkpoint_every < run.steps or run.checkpoint_minutes):
        yield (
            "run.restarts: without checkpoints (run.checkpoint_every, run.checkpoint_minutes) a "
            "run that is restarted begins again"
        )
    if run.checkpoint_every > run.steps:
        yield (
            f"run.checkpoint_every: is {run.checkpoint_every} and the run has {run.steps} steps: "
            "there will be none by steps before the end"
        )
    lasting = run.export or run.final_checkpoint or 0 < run.checkpoint_every <= run.steps
    if run.keep_best and (job.validation is None or not job.validation.every):
        yield "run.keep_best: there are no validations before the end; set validation.every"
    if job.trained and not lasting:
        yield (
            "nothing of the trained model will be kept: run.export and run.final_checkpoint are "
            "false, and there are no checkpoints"
        )

    if job.replayed is not None:
        yield from _replays(job, job.replayed)
    elif run.max_staleness:
        yield from _ahead(job)

    # Rows that are left over make a small mini-batch of their own.
    rows = job.algorithm.rows_per_step
    mini = job.algorithm.rows_per_update
    if rows is not None and mini is not None and rows % mini:
        yield (
            f"algorithm: {mini:,} sequences of an optimizer step do not divide the {rows:,} of a "
            f"step: the last one has {rows % mini:,}"
        )

    # Greedy decoding leaves a group of responses nothing to compare.
    generates = any(model.role.generates for model in job.models.values())
    if job.sampling.temperature == 0 and generates:
        yield "sampling.temperature: 0 is greedy, so all responses to a prompt are the same"

    # Engines that nothing compares with their trainers
    for name, loss in job.algorithm.losses().items():
        model = job.models.get(name)
        if model is None or not model.role.generates or "logprobs" in loss.needs:
            continue
        yield (
            f"{name}: its loss needs no logprobs, so nothing checks that its engine generates with "
            "the weights that are trained (run.mismatch_stop)"
        )

    # Schedules that end at another step than the run does.
    updates = job.algorithm.updates_per_step()
    for name, model in job.models.items():
        optimizer = model.spec.optimizer
        if optimizer is None or updates is None:
            continue
        total = updates * run.steps
        if optimizer.schedule != "constant" and optimizer.total_steps != total:
            yield (
                f"{name}.optimizer.total_steps: is {optimizer.total_steps}, and the run has "
                f"{total} optimizer steps: the {optimizer.schedule} schedule ends at another step"
            )
        if optimizer.warmup_steps >= total:
            yield (
                f"{name}.optimizer.warmup_steps: is {optimizer.warmup_steps}, and the run has "
                f"{total} steps of it"
            )


def _replays(job: Job, replayed: Path) -> Iterator[str]:
    """Yield what a run that replays another one leaves out, and in which settings it differs."""
    left_out = "engines"
    if "validation" in job.tables and job.validation is None:
        left_out = "engines and validations"
    yield f"run.replay: responses come from {replayed}; there are no {left_out}"
    found = changes(job, replayed) or []
    # What its engines, places and reports are does not matter; what the algorithm is does.
    different = [change for change in found if not change.allowed or change.key.endswith(".layout")]
    for change in sorted(different, key=lambda change: change.key):
        yield f"run.replay: {change}: the training will not have the same bits"


def _ahead(job: Job) -> Iterator[str]:
    """Yield what keeps the steps of a run from overlapping, with run.max_staleness."""
    apart = any(model.rollout_pool is not None for model in job.models.values())
    if apart and registry().runtime_capabilities(job.runtime).max_ranks == 1:
        yield (
            f"run.max_staleness: runtime {job.runtime} makes one call after the other, so that "
            "nothing overlaps; the steps are those of a runtime that does (ray)"
        )

    # Where the calls of each role run; numerical work is no role, and draws wait for no turn.
    pools = {name: model.pool for name, model in job.models.items()}
    pools |= {name: scorer.pool or job.reward_pool for name, scorer in job.scorers.items()}
    pools |= {"compute": job.main_pool}
    trained = {name for name, pool in pools.items() if pool not in job.untrained_pools}
    try:
        read = planner_of(job).read_early(job, trained) if job.planner else ()
    except NotPlanned:
        return
    if read:
        named = ", ".join(f"ctx.{name}" for name in read)
        yield (
            f"run.max_staleness: {job.algorithm_name} itself reads the result of {named}, which "
            "the step's own turn makes: the next step is not generated before it has that"
        )
