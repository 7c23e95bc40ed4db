"""Generation on one rank: rows to requests, completions to columns."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Collection, Sequence

import attrs
import torch

from hybridflow.core.contracts.rollout import Request, RolloutEngine, SamplingParams
from hybridflow.core.contracts.worker import RankContext
from hybridflow.core.values.batch import Batch
from hybridflow.core.values.columns import Column, tokens
from hybridflow.core.values.metrics import Metrics
from hybridflow.core.workers.episodes import Episodes, run_episodes

GENERATED = ("response_ids", "rollout_logprobs", "loss_mask", "weight_version", "finish_reason")
EPISODE_COLUMNS = (*GENERATED, "turn", "episode_return", "turn_rewards", "turn_states")


def generate_rows(
    engine: RolloutEngine, batch: Batch, sampling: SamplingParams, seed: int, max_tokens: Sequence[int] | None,
    extras: Collection[str] = (),
) -> Batch:  # fmt: skip
    """Responses for the rows' prompts, with their logprobs, versions and finish reasons."""
    started = time.perf_counter()
    requests = make_requests(batch, sampling, seed, max_tokens, extras)
    done = engine.generate(requests) if requests else []
    ids = tokens([c.response_ids for c in done], torch.int64)
    reasons = [c.finish_reason for c in done]
    metrics = _generation_metrics(len(ids.values), reasons, started, engine)
    return Batch(
        {
            "response_ids": ids,
            "rollout_logprobs": tokens([c.logprobs for c in done], torch.float32),
            "loss_mask": Column(torch.ones(len(ids.values), dtype=torch.uint8), ids.lengths),
            "weight_version": tokens([c.weight_version for c in done], torch.int32),
            "finish_reason": reasons,
        },
        metrics,
    )


def generate_episodes(
    engine: RolloutEngine, batch: Batch, sampling: SamplingParams, seed: int, max_tokens: Sequence[int] | None,
    episodes: Episodes, context: RankContext, extras: Collection[str] = (),
) -> Batch:  # fmt: skip
    """Episodes of the rows' prompts."""
    started = time.perf_counter()
    requests = make_requests(batch, sampling, seed, max_tokens, extras)
    made = run_episodes(engine, requests, list(batch["meta"].values), episodes, context)
    own = float(torch.as_tensor(made["loss_mask"].values).sum())
    metrics = _generation_metrics(own, list(made["finish_reason"].values), started, engine)
    return Batch({name: made[name] for name in made}, Metrics.merge([made.metrics, metrics]))


def make_requests(
    batch: Batch,
    sampling: SamplingParams,
    seed: int,
    max_tokens: Sequence[int] | None,
    extras: Collection[str] = (),
) -> list[Request]:
    """A request for each row. extras: columns that the engine declares; a row's values go along, where there are any."""
    samples, requests = torch.as_tensor(batch["sample_id"].values).tolist(), []
    more = {name: list(batch[name]) for name in extras if name in batch}
    for row, (prompt, sample) in enumerate(zip(batch["prompt_ids"], samples, strict=True)):
        limit = sampling
        if max_tokens is not None:
            limit = attrs.evolve(sampling, max_tokens=max_tokens[sample % len(max_tokens)])
        own = {name: values[row] for name, values in more.items()}
        requests.append(
            Request(row, prompt.numpy(), limit, seed=row_seed(seed, sample), extras=own)
        )
    return requests


def _generation_metrics(
    made: float, reasons: Sequence[str], started: float, engine: RolloutEngine
) -> Metrics:
    """`made`: tokens."""
    rows = len(reasons)
    metrics = Metrics(
        {
            "response_length": (made, rows),
            "clipped": (list(reasons).count("length"), rows),
            "generate_seconds": (time.perf_counter() - started, 1.0),
        }
    )
    metrics.maxima.update(engine.figures())
    return metrics


def row_seed(seed: int, sample: int) -> int:
    """The seed of one sequence: from the run's seed and the sample's number, so not from ranks or batches."""
    digest = hashlib.blake2b(f"{seed}:{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
