"""What follows from a job: rows per rank, optimizer steps, devices, schedules; and what is legal but hardly meant."""

from __future__ import annotations

from collections.abc import Iterator

from hybridflow.core.job.job import Job, PlacedModel


def figures(job: Job) -> Iterator[tuple[str, str]]:
    """(what, value) pairs for `hybridflow show`."""
    yield "devices", _devices(job)
    rows, mini = job.algorithm.rows_per_step, job.algorithm.rows_per_update
    updates = job.algorithm.updates_per_step()
    yield "sequences per step", _count(rows)
    if mini is not None:
        yield "sequences per optimizer step", f"{mini:,}"
    if updates is None:
        yield "optimizer steps", "the algorithm decides at run time"
    else:
        yield "optimizer steps per step", f"{updates:,}"
        yield "optimizer steps in all", f"{updates * job.run.steps:,}"
    if rows is not None:
        yield "sequences in all", f"{rows * job.run.steps:,}"
        limit = job.data.max_prompt_tokens + job.sampling.max_tokens
        if job.data.max_prompt_tokens and any(
            m.spec.engine and m.role.generates for m in job.models.values()
        ):
            yield "tokens per step, at most", f"{rows * limit:,} ({rows:,} x {limit:,})"
    for name, model in job.models.items():
        yield name, _role(job, model, rows, mini)
    for name, reward in job.scorers.items():
        yield (
            name,
            f"{_sum(reward.parts)}, on the {_ranks(job.pools[job.main_pool].world)} of pool {job.main_pool}",
        )
    yield "data", f"drawn on rank 0 of pool {job.main_pool}"
    yield "tokenizer", _tokenizer(job)
    yield "checkpoints", _checkpoints(job)
    yield "validation", _validation(job)
    yield "folder", str(job.folder)


def _role(job: Job, model: PlacedModel, rows: int | None, mini: int | None) -> str:
    layout, does = model.layout, "trained" if model.role.trained else "frozen"
    parts = [
        f"{model.role.kind}, {does}",
        f"{_ranks(layout.world)} of pool {model.pool}, layout {layout}",
    ]
    if rows is not None:
        parts.append(f"{_share(rows, layout.dp)} sequences per step and dp rank")
    if mini is not None and mini != rows and model.role.trained:
        parts.append(f"{_share(mini, layout.dp)} per optimizer step and dp rank")
    parts.append(f"micro-batches of {model.spec.micro_batch_tokens:,} tokens")
    if model.spec.engine:
        parts.append(f"generates with {model.spec.engine}")
    return "; ".join(parts)


def _share(rows: int, dp: int) -> str:
    low, high = rows // dp, -(-rows // dp)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _count(rows: int | None) -> str:
    return "the algorithm decides at run time" if rows is None else f"{rows:,}"


def _sum(parts) -> str:
    return " + ".join(
        p.function if p.weight == 1 else f"{p.weight:g} x {p.function}" for p in parts
    )


def _devices(job: Job) -> str:
    pools = ", ".join(
        f"{n} {' + '.join(map(str, p.devices_per_node))}" for n, p in job.pools.items()
    )
    return f"{sum(p.world for p in job.pools.values())} x {job.device} (pools: {pools}), runtime {job.runtime}"


def _tokenizer(job: Job) -> str:
    config = job.tokenizer
    if config.path or (config.characters is None and config.train is None):
        return f"from {config.path or job.tokenizer_path}"
    if config.characters is not None:
        return f"of {len(config.characters)} characters and 3 special tokens"
    return f"{config.train}, trained on the run's data, at most {config.vocab_size:,} tokens"


def _checkpoints(job: Job) -> str:
    every = job.run.checkpoint_every
    if not every:
        return "only when the run is told to stop (run.checkpoint_every is 0)"
    return f"every {_steps(every)}, {job.run.steps // every} in all; the newest {job.run.keep_checkpoints} are kept"


def _validation(job: Job) -> str:
    section = job.validation
    if section is None:
        return "none"
    times = ["before the first step"] if section.at_start else []
    between = (job.run.steps - 1) // section.every if section.every else 0
    times += [f"every {_steps(section.every)} ({between} times)"] if between else []
    goal = [f"until the score reaches {section.stop_at}"] if section.stop_at is not None else []
    return f"{section.name}: " + ", ".join([*times, *goal, "at the end"])


def _steps(every: int) -> str:
    return "step" if every == 1 else f"{every} steps"


def remarks(job: Job) -> Iterator[str]:
    """What works, and is hardly meant."""
    run, updates = job.run, job.algorithm.updates_per_step()
    if run.restarts and not 0 < run.checkpoint_every < run.steps:
        yield "run.restarts: without checkpoints (run.checkpoint_every) a run that is restarted begins again"
    if run.checkpoint_every > run.steps:
        yield f"run.checkpoint_every: is {run.checkpoint_every} and the run has {run.steps} steps: there will be none"
    if job.sampling.temperature == 0 and any(m.role.generates for m in job.models.values()):
        yield "sampling.temperature: 0 is greedy, so all responses to a prompt are the same"
    for name, model in job.models.items():
        optimizer = model.spec.optimizer
        if optimizer is None or updates is None:
            continue
        in_all = updates * run.steps
        if optimizer.schedule != "constant" and optimizer.total_steps != in_all:
            yield (
                f"{name}.optimizer.total_steps: is {optimizer.total_steps}, and the run has {in_all} optimizer steps: "
                f"the {optimizer.schedule} schedule ends at another step"
            )
        if optimizer.warmup_steps >= in_all:
            yield f"{name}.optimizer.warmup_steps: is {optimizer.warmup_steps}, and the run has {in_all} steps of it"
