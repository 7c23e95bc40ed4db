"""The actor's greedy responses to the held-out set, scored; and its loss where the set has responses."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import torch

from hybridflow.core.plugins import registry
from hybridflow.core.running.reporting import Reporter
from hybridflow.core.running.run import Run
from hybridflow.core.values.batch import Batch
from hybridflow.core.values.metrics import Metrics


def validate_if_due(run: Run, report: Reporter, ended: bool = False) -> None:
    """At most once a step."""
    section = run.job.validation
    if section is None or run.step in run.validations:
        return
    due = section.at_start if run.step == 0 else section.every > 0 and run.step % section.every == 0
    if due or ended:
        validate(run, report)


def validate(run: Run, report: Reporter) -> dict[str, float]:
    """Metrics validation/<...>; the training state is left as it was."""
    section = run.job.validation
    assert section is not None
    counters = dict(run.ctx.counters)
    found: list[Metrics] = []
    total = run.session.prepared.rows["validation"]
    for start in range(0, total, section.batch_rows):
        rows = run.session.rows("validation", start, min(start + section.batch_rows, total))
        if section.generate:
            found.append(_generate(run, rows, section.samples if start == 0 else 0))
        if "response_ids" in rows:
            found += _losses(run, rows)
    run.ctx.finish()  # nothing of this is the next step's
    run.ctx.counters = counters
    values = Metrics.merge(found).prefixed("validation/").values()
    run.validations[run.step] = values
    report.validation(run, values)
    registry().notify("hybridflow_metrics", run=run, step=run.step, metrics=values)
    return values


def _losses(run: Run, rows: Batch) -> Iterator[Metrics]:
    """Of the trained roles whose losses read what the rows have, or what a frozen policy makes of them (a reference)."""
    frozen = {
        h.role.column: h
        for h in run.ctx.roles.values()
        if h.role.kind == "policy" and not h.role.trained
    }
    for name, loss in run.job.algorithm.losses().items():
        lacking = [column for column in loss.reads if column not in rows]
        if set(lacking) <= set(frozen):
            read = rows.join(*(frozen[column].logprobs(rows) for column in lacking))
            yield run.ctx.roles[name].loss(read, loss).result()


def _generate(run: Run, rows: Batch, samples: int) -> Metrics:
    prompts = rows.select(["prompt_ids", "group", "meta"])
    batch = run.ctx.actor.generate(prompts, greedy=True)
    scored = run.ctx.roles["reward"].score(batch)
    column = run.ctx.roles["reward"].role.column
    scores = torch.as_tensor(scored[column].values).double()
    if samples:
        _write_samples(run, batch.join(scored).take(slice(0, samples)), column)
    return Metrics({"score": (float(scores.sum()), len(scores)), **batch.metrics.means})


def _write_samples(run: Run, batch: Batch, column: str) -> None:
    tokenizer = run.session.prepared.tokenizer
    with open(run.job.folder / "samples.jsonl", "a") as file:
        for prompt, response, meta, score, reason in zip(
            batch["prompt_ids"],
            batch["response_ids"],
            batch["meta"],
            batch[column],
            batch["finish_reason"],
            strict=True,
        ):
            row = {
                "step": run.step,
                "prompt": tokenizer.decode(np.asarray(prompt)),
                "response": tokenizer.decode(np.asarray(response)),
                "answer": meta.get("answer"),
                "score": float(score),
                "finish_reason": reason,
            }
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
