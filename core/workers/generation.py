"""Generation on one rank: rows to requests, completions to columns."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

import attrs
import numpy as np
import torch

from hybridflow.core.contracts.rollout import (
    Completion,
    Request,
    RolloutEngine,
    SamplingParams,
)
from hybridflow.core.contracts.worker import RankContext
from hybridflow.core.values.batch import Batch
from hybridflow.core.values.branches import BRANCHES
from hybridflow.core.values.columns import Column, tokens
from hybridflow.core.values.metrics import Metrics
from hybridflow.core.values.outcomes import failed_rows, finished
from hybridflow.core.values.seeds import row_seed
from hybridflow.core.workers.carried import Carried, Opened
from hybridflow.core.workers.episode_runner import run_episodes
from hybridflow.core.workers.episodes import Episodes
from hybridflow.core.workers.gradients import LAG
from hybridflow.core.workers.published import Published

GENERATE_READS = ("prompt_ids", "sample_id", "max_tokens")
"""Columns that generation reads; max_tokens where the batch has it."""
EPISODE_READS = (*GENERATE_READS, "meta")
"""Columns that episodes read."""
GENERATED = (
    "response_ids",
    "rollout_logprobs",
    "loss_mask",
    "weight_version",
    "finish_reason",
    "outcome",
)
"""The columns that `generate` adds."""
COLLECTED = (*GENERATED, LAG)
"""The columns that `collect` adds."""
EPISODE_COLUMNS = (
    *GENERATED,
    "turn",
    "episode_return",
    "turn_rewards",
    "turn_states",
    BRANCHES,
    "prompt_ids",
)
"""The columns that `episodes` adds, the last one in the place of the rows' own."""


def generate_rows(
    engine: RolloutEngine,
    batch: Batch,
    sampling: SamplingParams,
    seed: int,
    extras: Collection[str] = (),
    beside: Carried | None = None,
) -> Batch:
    """Generate a response for each row's prompt: the columns GENERATED, in the rows' order.

    beside: open rows of the engine, which go on meanwhile.
    """
    started = time.perf_counter()
    # Some replicas have no rows in small batches.
    requests = make_requests(batch, sampling, seed, extras)
    if beside is None:
        completions = engine.generate(requests) if requests else []
    else:
        # Open rows have the numbers of their samples, from 0 on.
        others = [attrs.evolve(request, id=-1 - request.id) for request in requests]
        beside.open(others)
        completions = beside.collect(engine, [request.id for request in others])
    return _generated(completions, _figures(engine, started))


def collect_rows(
    engine: RolloutEngine, batch: Batch, step: int, carried: Carried, published: Published
) -> Batch:
    """Complete rows that are open, those of other steps beside them: the columns COLLECTED.

    step: the one that trains on them.
    """
    started = time.perf_counter()
    completions = carried.collect(engine, samples_of(batch))
    return collected(completions, step, published, _figures(engine, started))


def collected(
    completions: Sequence[Completion],
    step: int,
    published: Published,
    figures: Metrics | None = None,
) -> Batch:
    """Return completions that a step trains on: the columns COLLECTED.

    figures: further metrics, of the engine.
    """
    generated = _generated(completions, figures or Metrics())
    made_by = generated["weight_version"]
    lags = published.lags(np.asarray(made_by.values), step)
    versions = [len(np.unique(done.weight_version)) for done in completions]
    metrics = generated.metrics
    metrics.means["staleness"] = (float(lags.sum(dtype=np.int64)), float(len(lags)))
    metrics.means["versions_per_sequence"] = (float(sum(versions)), float(len(versions)))
    metrics.maxima["staleness_max"] = float(lags.max(initial=0))
    return generated.with_columns(**{LAG: Column(torch.from_numpy(lags), made_by.lengths)})


def samples_of(batch: Batch) -> list[int]:
    """Return the numbers of the rows' samples in the run."""
    samples: list[int] = torch.as_tensor(batch["sample_id"].values).tolist()
    return samples


def opened_requests(
    batch: Batch, sampling: SamplingParams, seed: int, extras: Collection[str] = ()
) -> list[Request]:
    """Return one request per row, whose id is the number of the row's sample in the run."""
    requests = make_requests(batch, sampling, seed, extras)
    return [
        attrs.evolve(request, id=sample)
        for request, sample in zip(requests, samples_of(batch), strict=True)
    ]


def rows_of(opened: Sequence[Opened]) -> Batch:
    """Return rows that were opened as a batch, which travels; `opened_of` undoes it."""
    made = [row.made for row in opened]
    return Batch(
        {
            "sample_id": torch.tensor([one.id for one in made], dtype=torch.int64),
            "prompt_ids": tokens([row.prompt_ids for row in opened], torch.int64),
            **_columns(made),
            "finish_reason": [one.finish_reason for one in made],
        }
    )


def opened_of(rows: Batch) -> list[Opened]:
    """Return what `rows_of` was given."""
    samples = samples_of(rows)
    prompts, ids, logprobs, versions = (
        [np.asarray(values, dtype) for values in rows[name]]
        for name, dtype in (
            ("prompt_ids", np.int64),
            ("response_ids", np.int64),
            ("rollout_logprobs", np.float32),
            ("weight_version", np.int64),
        )
    )
    reasons = list(rows["finish_reason"].values)
    fields = zip(samples, ids, logprobs, versions, reasons, strict=True)
    made = [Completion(*each) for each in fields]
    return [Opened(prompt, one) for prompt, one in zip(prompts, made, strict=True)]


def _columns(completions: Sequence[Completion]) -> dict[str, Column]:
    return {
        "response_ids": tokens([done.response_ids for done in completions], torch.int64),
        "rollout_logprobs": tokens([done.logprobs for done in completions], torch.float32),
        "weight_version": tokens([done.weight_version for done in completions], torch.int32),
    }


def _generated(completions: Sequence[Completion], figures: Metrics) -> Batch:
    """Return completions as the columns GENERATED, with metrics.

    figures: further ones, of the engine.
    """
    # Every token is the model's, so every one counts in the loss.
    made = _columns(completions)
    ids = made["response_ids"]
    reasons = [completion.finish_reason for completion in completions]
    assert ids.lengths is not None
    metrics = _generation_metrics(ids.lengths, reasons, figures)
    columns = {
        "response_ids": ids,
        "rollout_logprobs": made["rollout_logprobs"],
        "loss_mask": Column(torch.ones(len(ids.values), dtype=torch.uint8), ids.lengths),
        "weight_version": made["weight_version"],
        "finish_reason": reasons,
        "outcome": [finished(reason) for reason in reasons],
    }
    return Batch(columns, metrics)


def generate_episodes(
    engine: RolloutEngine,
    batch: Batch,
    sampling: SamplingParams,
    seed: int,
    episodes: Episodes,
    context: RankContext,
    extras: Collection[str] = (),
) -> Batch:
    """Run an episode from each row's prompt: the columns EPISODE_COLUMNS, in the rows' order.

    Raises EnvironmentFailure when an environment fails.
    """
    started = time.perf_counter()
    requests = make_requests(batch, sampling, seed, extras)
    played = run_episodes(engine, requests, list(batch["meta"].values), episodes, context)

    # Only tokens that the model wrote count as generated, and nothing of failed episodes.
    kept = np.flatnonzero(~failed_rows(list(played["outcome"].values)))
    masks = list(played["loss_mask"])
    written = [float(masks[row].sum()) for row in kept]
    reasons = [str(played["finish_reason"].values[row]) for row in kept]
    metrics = _generation_metrics(written, reasons, _figures(engine, started))
    columns = {name: played[name] for name in played}
    return Batch(columns, Metrics.merge([played.metrics, metrics]))


def make_requests(
    batch: Batch,
    sampling: SamplingParams,
    seed: int,
    extras: Collection[str] = (),
) -> list[Request]:
    """Return one request per row, whose id is the row's number.

    extras: columns that the engine declares; requests get the row's values if the batch has them.
    """
    # Seeds follow the sample's number, which does not depend on ranks or batches.
    samples = samples_of(batch)
    extra_columns = {name: list(batch[name]) for name in extras if name in batch}
    limits = None
    if "max_tokens" in batch:
        limits = torch.as_tensor(batch["max_tokens"].values).tolist()
    requests = []
    for row, (prompt, sample) in enumerate(zip(batch["prompt_ids"], samples, strict=True)):
        row_sampling = sampling
        if limits is not None:
            row_sampling = attrs.evolve(sampling, max_tokens=limits[row])

        request = Request(
            row,
            prompt.numpy(),
            row_sampling,
            seed=row_seed(seed, sample),
            extras={name: values[row] for name, values in extra_columns.items()},
        )
        requests.append(request)
    return requests


def _figures(engine: RolloutEngine, started: float) -> Metrics:
    """Return metrics of a call of an engine; started: its start, by time.perf_counter."""
    # The engine's own, such as its cache hits, are maxima over ranks.
    seconds = (time.perf_counter() - started, 1.0)
    return Metrics({"generate_seconds": seconds}, maxima=dict(engine.figures()))


def _generation_metrics(
    lengths: Sequence[float] | np.ndarray, reasons: Sequence[str], figures: Metrics
) -> Metrics:
    """Return the metrics of a generation; lengths: generated tokens of each row."""
    rows = len(reasons)
    means = {
        "response_length": (sum(lengths), rows),
        "clipped": (list(reasons).count("length"), rows),
    }
    return Metrics.merge([Metrics(means, spreads={"response_length": lengths}), figures])
