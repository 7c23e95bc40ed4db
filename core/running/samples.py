"""samples.jsonl: what the model wrote, in training and in validations, as text with its scores."""

from __future__ import annotations

import json

import numpy as np
import torch

from hybridflow.core.running.run import Run
from hybridflow.core.values.batch import Batch
from hybridflow.core.values.files import SAMPLES


def write_rollouts(run: Run) -> None:
    """Write the first rollout of each of run.samples groups that were scored in this step."""
    scored = run.ctx.take_scored()
    if not scored or not run.job.run.samples:
        return

    # The first reward that scored got every response of the step's first generation.
    batch = scored[0].batch
    if not all(name in batch for name in ("prompt_ids", "response_ids", "group", "meta")):
        return
    groups = torch.as_tensor(batch["group"].values)
    _, firsts = np.unique(np.asarray(groups), return_index=True)
    rows = np.sort(firsts)[: run.job.run.samples]
    chosen = batch.join(scored[0].scores).take(rows)
    write_samples(run, chosen, scored[0].role.column, "train")

    # Bytes that were fetched for samples do not count in the next step.
    run.session.runtime.traffic.take()


def write_samples(run: Run, batch: Batch, column: str, data: str) -> None:
    """Append the rows of the batch, with their scores in `column`.

    data: the set that the prompts are of. Special tokens are part of the texts.
    """
    tokenizer = run.session.prepared.tokenizer
    reasons = batch["finish_reason"] if "finish_reason" in batch else [None] * batch.rows
    outcomes = batch["outcome"] if "outcome" in batch else [None] * batch.rows
    rows = zip(
        batch["prompt_ids"],
        batch["response_ids"],
        batch["meta"],
        batch[column],
        reasons,
        outcomes,
        strict=True,
    )
    with open(run.job.folder / SAMPLES, "a") as file:
        for prompt, response, meta, score, reason, outcome in rows:
            sample = {
                "step": run.step,
                "data": data,
                "prompt": tokenizer.decode(np.asarray(prompt), skip_special=False),
                "response": tokenizer.decode(np.asarray(response), skip_special=False),
                "answer": meta.get("answer"),
                "score": None if np.isnan(score) else float(score),
                "finish_reason": reason,
                "outcome": outcome,
            }
            file.write(json.dumps(sample, ensure_ascii=False) + "\n")
