"""Validation: scores of greedy responses to held-out prompts, and losses on held-out rows."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hybridflow.core.contracts.observer import SampleRow
from hybridflow.core.plugins import registry
from hybridflow.core.running.reporting import Reporter
from hybridflow.core.running.run import Run
from hybridflow.core.values.batch import Batch
from hybridflow.core.values.metrics import Metrics


def validate_if_due(run: Run, report: Reporter, ended: bool = False) -> None:
    """Validate where [validation] asks for it, and when the run has ended; at most once a step."""
    section = run.job.validation
    if section is None or run.step in run.validations:
        return

    # Before the first step it is due only with `at_start`, later after every `every` steps.
    if run.step == 0:
        due = section.at_start
    else:
        due = section.every > 0 and run.step % section.every == 0
    if due or ended:
        validate(run, report)


def validate(run: Run, report: Reporter) -> dict[str, float]:
    """Compute, record and return the metrics validation/*; the training state stays as it was."""
    section = run.job.validation
    assert section is not None
    counters = dict(run.ctx.counters)

    # In pieces, so that a large held-out set needs the memory of batch_rows rows only.
    parts: list[Metrics] = []
    samples: list[SampleRow] = []
    total = run.session.prepared.rows["validation"]
    for start in range(0, total, section.batch_rows):
        rows = run.session.rows("validation", start, min(start + section.batch_rows, total))
        if section.generate:
            # The first rows of each validation are the same, so that they can be compared.
            left = section.samples - len(samples)
            parts.append(_generate(run, rows, left, samples))
        if "response_ids" in rows:
            parts += _losses(run, rows)

    # The calls above must not show in the next step's metrics, nor change its random draws.
    run.ctx.finish()
    run.recorder.clear()
    run.ctx.counters.update(counters)  # a page that is written ahead has the same ones

    values = Metrics.merge(parts).prefixed("validation/").values()
    run.validations[run.step] = values
    report.validation(run, values)
    report.samples(run.step, samples)
    registry().notify("hybridflow_metrics", run=run, step=run.step, metrics=values)
    return values


def _losses(run: Run, rows: Batch) -> Iterator[Metrics]:
    """Yield the loss of each trained role for which the held-out rows have all columns.

    A column that they lack may be one that a frozen policy computes (ref_logprobs).
    """
    # Column -> the frozen policy that computes it.
    frozen = {
        handle.role.column: handle
        for handle in run.ctx.roles.values()
        if handle.role.kind == "policy" and not handle.role.trained
    }
    for name, loss in run.job.algorithm.losses().items():
        missing = [column for column in loss.reads if column not in rows]
        if set(missing) <= set(frozen):
            batch = rows.join(*(frozen[column].logprobs(rows) for column in missing))
            yield run.ctx.roles[name].loss(batch, loss).result()


def _generate(run: Run, rows: Batch, left: int, samples: list[SampleRow]) -> Metrics:
    """Generate and score greedy responses; the first `left` rows are added to `samples`."""
    # Only what a prompt has: responses of the data must not reach the actor.
    prompts = rows.select(["prompt_ids", "group", "meta"])
    batch = run.ctx.actor.generate(prompts, greedy=True)
    reward = run.ctx.roles["reward"]
    scored = reward.score(batch)
    column = reward.role.column
    scores = torch.as_tensor(scored[column].values).double()
    scores = scores[~scores.isnan()]  # without failed rows

    if left > 0:
        shown = batch.join(scored).take(slice(0, left))
        samples += run.recorder.read(shown, run.step, "validation")
    score = (float(scores.sum()), len(scores))
    means = dict(batch.metrics.means)
    means.pop("weight_version", None)  # which the step is known by
    return Metrics({"score": score, **means})
