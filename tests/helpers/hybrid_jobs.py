"""What the ranks run in the tests of the HybridEngine: a training backend and an engine on the same ranks."""

from __future__ import annotations

from typing import Any

import torch

from helpers.training_jobs import Setup, make_worker, mine, parameters
from hybridflow.core.contracts.loss import Loss
from hybridflow.core.contracts.rollout import SamplingParams
from hybridflow.core.values.batch import Batch
from hybridflow.core.workers.model_worker import ModelWorker


def request(batch: Batch) -> Batch:
    """The same rows on every rank: those of one generation replica generate them together."""
    return batch.take(slice(0, 4)).select(["prompt_ids"]).with_columns(sample_id=torch.arange(4))


def unequal(worker: ModelWorker) -> list[str]:
    """Parameters whose values in the engine are not the trainer's, bit for bit in the engine's dtype."""
    engine, rank = worker.engine, worker.context.rank
    full = {name: tensor.clone() for name, tensor in worker.backend.full_parameters()}
    wrong = []
    for name, boxes in engine.layout().held[rank].items():
        for box in boxes:
            stored = engine.read(name, box)
            if not torch.equal(stored, full[name][box.slices()].to(stored.dtype)):
                wrong.append(name)
    return wrong


def lacking(worker: ModelWorker) -> int:
    """Bytes of the engine's shard that the training shard of this rank does not have, in float32."""
    mine, total = worker.backend.layout().held[worker.context.rank], 0
    for name, boxes in worker.engine.layout().held[worker.context.rank].items():
        rest = list(boxes)
        for own in mine.get(name, ()):
            rest = [part for box in rest for part in box.minus(own)]
        total += sum(box.numel for box in rest) * 4
    return total


def train_and_sync(
    rank: int, world: int, setup: Setup, batch: Batch, loss: Loss, steps: int
) -> dict[str, Any]:
    worker = make_worker(rank, setup)
    ask, found = (
        request(batch),
        {"wrong": [], "tokens": [], "worst": 0.0, "versions": set(), "seen": set()},
    )
    for step in range(steps + 1):
        made = ask.join(worker.generate(ask, SamplingParams(max_tokens=8), seed=step))
        if setup.keep_engine and setup.engine == "transformers":  # the others give no view
            found["wrong"] += unequal(worker)
        again = worker.logprobs(made, {"logprobs": "x"})
        if "x" in again:  # on the last stage
            difference = again["x"].values - made["rollout_logprobs"].values
            found["worst"] = max(found["worst"], float(difference.abs().max()))
        found["tokens"].append(made["response_ids"].values.tolist())
        found["versions"] |= set(made["weight_version"].values.tolist())
        worker.update([(mine(worker, batch), loss)])
    plan, moved = worker.hybrid.plan, worker.hybrid.last
    found["planned"] = (plan.bytes_received[rank], plan.bytes_sent[rank])
    found["moved"] = (moved.bytes_received, moved.bytes_sent)
    found["buffers"] = moved.peak_buffer_bytes
    found["lacking"], found["parameters"] = lacking(worker), parameters(worker)
    worker.close()
    return found
