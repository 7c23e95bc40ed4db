"""Figures that follow from a job: rows per rank, optimizer steps, devices, schedules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hybridflow.core.contracts.training import training_settings
from hybridflow.core.job.job import Job, PlacedModel

UNKNOWN = "the algorithm decides at run time"
"""The value of a figure that an algorithm does not state."""


def figures(job: Job) -> Iterator[tuple[str, str]]:
    """Yield pairs of a name and a value, in the order in which `hybridflow show` prints them."""
    yield "devices", _devices(job)

    # The amount of work, as far as the algorithm states it.
    rows = job.algorithm.rows_per_step
    mini = job.algorithm.rows_per_update
    yield "sequences per step", UNKNOWN if rows is None else f"{rows:,}"
    if mini is not None:
        yield "sequences per optimizer step", f"{mini:,}"
    updates = job.algorithm.updates_per_step()
    if updates is None:
        yield "optimizer steps", UNKNOWN
    else:
        yield "optimizer steps per step", f"{updates:,}"
        yield "optimizer steps in all", f"{updates * job.run.steps:,}"
    if rows is not None:
        yield "sequences in all", f"{rows * job.run.steps:,}"
        limit = job.data.max_prompt_tokens + job.sampling.max_tokens
        if job.data.max_prompt_tokens and any(
            model.spec.engine and model.role.generates for model in job.models.values()
        ):
            yield "tokens per step, at most", f"{rows * limit:,} ({rows:,} x {limit:,})"

    # Roles, and what runs beside them.
    for name, model in job.models.items():
        yield name, _role(job, model, rows, mini)
    for name, reward in job.scorers.items():
        pool = reward.pool or job.reward_pool
        yield name, f"{_sum(reward.parts)}, on the {_ranks(job.pools[pool].world)} of pool {pool}"
    yield "data", f"drawn on rank 0 of pool {job.data_pool}"
    yield "tokenizer", _tokenizer(job)
    yield "checkpoints", _checkpoints(job)
    yield "exports", _exports(job)
    yield "validation", _validation(job)
    yield "folder", str(job.folder)


def _role(job: Job, model: PlacedModel, rows: int | None, mini: int | None) -> str:
    """Return a model in a line: its ranks, its share of a step's rows and of a mini-batch, its
    engine.
    """
    layout = model.layout
    state = "trained" if model.role.trained else "frozen"
    parts = [
        f"{model.role.kind}, {state}",
        f"{_ranks(layout.world)} of pool {model.pool}, layout {layout}",
    ]
    # A role's rows are shared among its dp ranks.
    if rows is not None:
        parts.append(f"{_share(rows, layout.dp)} sequences per step and dp rank")
    if mini is not None and mini != rows and model.role.trained:
        parts.append(f"{_share(mini, layout.dp)} per optimizer step and dp rank")
    # How it computes, and with what it generates.
    parts.append(f"micro-batches of {model.spec.micro_batch_tokens:,} tokens, {_rows(model)}")
    if model.spec.engine:
        parts.append(f"generates with {model.spec.engine}")
    return "; ".join(parts)


def _rows(model: PlacedModel) -> str:
    """Return how a micro-batch is packed (padded or not), and why not more densely."""
    settings = training_settings(model.spec.backend_config)
    packing, reason = settings.packing(model.spec.model.hf_config)
    return f"{packing.value} ({reason})" if reason else packing.value


def _share(rows: int, dp: int) -> str:
    """Return the rows of one of `dp` ranks: "4", or "4 to 5" where they do not divide."""
    low = rows // dp
    high = -(-rows // dp)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _sum(parts: Sequence[Any]) -> str:
    """Return a reward's functions with their weights: "exact + 0.5 x short"."""
    return " + ".join(
        part.function if part.weight == 1 else f"{part.weight:g} x {part.function}"
        for part in parts
    )


def _devices(job: Job) -> str:
    """Return all devices, and those of each pool, node by node."""
    texts = []
    for name, pool in job.pools.items():
        nodes = " + ".join(map(str, pool.devices_per_node))
        texts.append(f"{name} {nodes}{' on CPUs' if pool.device == 'cpu' else ''}")
    total = sum(pool.world for pool in job.pools.values() if pool.device is None)
    return f"{total} x {job.device} (pools: {', '.join(texts)}), runtime {job.runtime}"


def _tokenizer(job: Job) -> str:
    """Return where the tokenizer comes from."""
    # A folder's, or the model's own; one of given characters; or one that the run trains.
    config = job.tokenizer
    if config.path or (config.characters is None and config.train is None):
        return f"from {config.path or job.tokenizer_path}"
    if config.characters is not None:
        return f"of {len(config.characters)} characters and 3 special tokens"
    return f"{config.train}, trained on the run's data, at most {config.vocab_size:,} tokens"


def _checkpoints(job: Job) -> str:
    """Return in words when checkpoints are written, and how many are kept."""
    run = job.run
    times = []
    if run.checkpoint_every:
        times.append(f"every {_steps(run.checkpoint_every)}")
    if run.checkpoint_minutes:
        times.append(f"every {run.checkpoint_minutes:g} minutes")
    if run.keep_best:
        times.append("with each validation that is among the best")
    if run.final_checkpoint:
        times.append("at the end")
    if not times:
        return "only when the run is told to stop"
    best = f" and the best {run.keep_best} by {run.best_metric}" if run.keep_best else ""
    return f"{', '.join(times)}; the newest {run.keep_checkpoints}{best} are kept"


def _exports(job: Job) -> str:
    """Return in words where the trained models are written at the end."""
    if not job.run.export:
        return "none (run.export = false), unless a later stage begins with them"
    return ", ".join(str(job.folder / "export" / name) for name in job.trained)


def _validation(job: Job) -> str:
    """Return in words when validation runs, and at which score it ends the run."""
    section = job.validation
    if section is None:
        return "none"

    # The last step is validated in any case.
    times = []
    if section.at_start:
        times.append("before the first step")
    between = (job.run.steps - 1) // section.every if section.every else 0
    if between:
        times.append(f"every {_steps(section.every)} ({between} times)")
    if section.stop_at is not None:
        times.append(f"until the score reaches {section.stop_at}")
    return f"{section.name}: " + ", ".join([*times, "at the end"])


def _steps(every: int) -> str:
    return "step" if every == 1 else f"{every} steps"
