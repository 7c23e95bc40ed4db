"""Bytes on the wire: counted where a transport is handed and delivers them, and counted by hand.

The account by hand knows Hugging Face's shapes and published rules, and none of our code. Each rank's part of a
parameter is an array of booleans.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from helpers.hybrid_jobs import request
from helpers.training_jobs import Setup, make_worker, mine
from hybridflow.core.contracts.loss import Loss
from hybridflow.core.contracts.rollout import SamplingParams
from hybridflow.core.values.batch import Batch

Shapes = Mapping[str, tuple[int, ...]]
Part = Callable[[str, tuple[int, ...], int], np.ndarray]
"""(name, shape, rank) -> which elements the rank has."""

# --- counted in the transport ---


class Counted:
    """A real transport, and the bytes that went through it."""

    def __init__(self, real: Any):
        self.real, self.sent, self.received = real, 0, 0

    def start(self, outgoing, incoming):
        self.sent += sum(message.nbytes for message in outgoing.values())
        return Delivery(self, self.real.start(outgoing, incoming))

    def close(self) -> None:
        self.real.close()


class Delivery:
    def __init__(self, counted: Counted, pending: Any):
        self.counted, self.pending = counted, pending

    def wait(self):
        messages = self.pending.wait()
        self.counted.received += sum(message.nbytes for message in messages.values())
        return messages


def sync_and_speak(
    rank: int, world: int, setup: Setup, batch: Batch, loss: Loss | None = None
) -> dict[str, Any]:
    """A sync whose bytes are counted, and generations: with the first weights, and behind a step of training.

    `worst` is the largest difference from the trainer's logprobs, on ranks that have its outputs.
    """
    worker = make_worker(rank, setup)
    try:
        hybrid = worker.hybrid
        counted = hybrid.__dict__["transport"] = Counted(hybrid.transport)
        worker.sync()
        said = {"received": counted.received, "sent": counted.sent, "spoken": [], "worst": 0.0}
        ask = request(batch)
        for step in range(1 if loss is None else 2):
            if step:
                worker.update([(mine(worker, batch), loss)])
            made = ask.join(worker.generate(ask, SamplingParams(max_tokens=8), seed=step))
            rows = zip(made["response_ids"], made["rollout_logprobs"], strict=True)
            said["spoken"].append([(ids.tolist(), logprobs.tolist()) for ids, logprobs in rows])
            again = worker.logprobs(made, {"logprobs": "x"})
            if "x" in again:
                worst = (again["x"].values - made["rollout_logprobs"].values).abs().max()
                said["worst"] = max(said["worst"], float(worst))
        if setup.engine == "vllm" and not setup.engine_config.get("own_process"):
            from vllm.distributed.parallel_state import get_tp_group

            said["group"] = (list(get_tp_group().ranks), get_tp_group().rank_in_group)
        return said
    finally:
        worker.close()


# --- counted by hand ---

ROWS_CUT = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
COLUMNS_CUT = ("o_proj", "down_proj")


def lacking(shapes: Shapes, wanted: Part, held: Part, rank: int) -> int:
    """Float32 bytes that a rank's engine takes and its trainer does not have there."""
    return 4 * sum(
        int((wanted(name, shape, rank) & ~held(name, shape, rank)).sum())
        for name, shape in shapes.items()
    )


def cut(shape: tuple[int, ...], dim: int, start: int, stop: int) -> np.ndarray:
    part = np.zeros(shape, bool)
    part[(slice(None),) * dim + (slice(start, stop),)] = True
    return part


def tensor_parallel(
    name: str, shape: tuple[int, ...], place: int, tp: int, kv_heads: int, vocabulary: int
) -> np.ndarray:
    """Megatron's cut (arXiv:1909.08053, section 3), which vLLM and SGLang share.

    What opens a block is cut along its rows (and its bias with it), what joins it again along its columns, embeddings
    and head along the vocabulary, padded to a multiple of `vocabulary` rows. Heads of keys and values that are fewer
    than tp are replicated.
    """
    kind = name.split(".")[-2]
    if kind in ("embed_tokens", "lm_head"):
        return padded(shape, 0, place, tp, vocabulary)
    if kind in ("k_proj", "v_proj") and kv_heads < tp:
        head = place * kv_heads // tp
        rows = shape[0] // kv_heads
        return cut(shape, 0, head * rows, (head + 1) * rows)
    if kind in ROWS_CUT:
        return padded(shape, 0, place, tp, tp)
    if kind in COLUMNS_CUT:
        return padded(shape, 1, place, tp, tp)
    return np.ones(shape, bool)


def sglang_on_cpu(
    name: str, shape: tuple[int, ...], place: int, tp: int, kv_heads: int, vocabulary: int
) -> np.ndarray:
    """The same cut behind SGLang's padding on a CPU (its configs/update_config.py).

    Heads of keys and values are padded to a multiple of tp, with their groups of queries, and widths of MLPs to a
    multiple of 32 tp. Ranks whose share is padding take less, the others more.
    """
    kind = name.split(".")[-2]
    if kind in ("q_proj", "k_proj", "v_proj", "o_proj") and kv_heads % tp:
        dim = 1 if kind in COLUMNS_CUT else 0
        return padded(shape, dim, place, tp, tp * shape[dim] // kv_heads)
    if kind in ("gate_proj", "up_proj", "down_proj"):
        return padded(shape, 1 if kind in COLUMNS_CUT else 0, place, tp, 32 * tp)
    return tensor_parallel(name, shape, place, tp, kv_heads, vocabulary)


def padded(shape: tuple[int, ...], dim: int, place: int, tp: int, multiple: int) -> np.ndarray:
    """The share of a rank where the size is padded to a multiple first."""
    share = -(-shape[dim] // multiple) * multiple // tp
    return cut(shape, dim, place * share, (place + 1) * share)


def rows_of_fsdp(name: str, shape: tuple[int, ...], rank: int, world: int) -> np.ndarray:
    """FSDP2 (torch.distributed.fsdp.fully_shard): each parameter is cut along dim 0, as by torch.chunk."""
    rows = -(-shape[0] // world)
    return cut(shape, 0, rank * rows, (rank + 1) * rows)


def range_of_zero(name: str, shape: tuple[int, ...], rank: int, world: int) -> np.ndarray:
    """ZeRO-3 (arXiv:1910.02054; deepspeed.zero.Init): each parameter is flat, padded, and cut into equal ranges."""
    size = int(np.prod(shape))
    length = -(-size // world)
    flat = cut((size,), 0, rank * length, (rank + 1) * length)
    return flat.reshape(shape)


def shard_of_megatron(
    name: str, shape: tuple[int, ...], rank: int, tp: int, pp: int, layers: int, kv_heads: int
) -> np.ndarray:
    """Megatron's cut, tp fastest; each pipeline stage has as many layers, the first the embeddings, the last the head."""
    stage, place = rank // tp, rank % tp
    if ".layers." in name:
        layer = int(name.split(".layers.")[1].split(".")[0])
        mine = layer // (layers // pp) == stage
    else:
        mine = stage == (0 if "embed_tokens" in name else pp - 1)
    if not mine:
        return np.zeros(shape, bool)
    return tensor_parallel(name, shape, place, tp, kv_heads, tp)


def from_hugging_face(
    model: torch.nn.Module, batch: Batch, spoken: list[tuple[list[int], list[float]]]
) -> float:
    """The largest difference from Hugging Face's logprobs, over responses to the rows of `request`."""
    worst = 0.0
    for prompt, (ids, logprobs) in zip(request(batch)["prompt_ids"], spoken, strict=True):
        response = torch.tensor(ids)
        sequence = torch.cat([torch.as_tensor(prompt).long(), response])
        with torch.no_grad():
            logits = model(input_ids=sequence[None]).logits[0, len(prompt) - 1 : -1].float()
        expected = logits.log_softmax(-1).gather(-1, response[:, None])[:, 0]
        worst = max(worst, float((expected - torch.tensor(logprobs)).abs().max()))
    return worst
