"""The outputs of a micro-batch, from the hidden states of the last pipeline stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)

from hybridflow.core.contracts.training import MicroBatch
from hybridflow.kit.huggingface.modeling import in_pieces, pick, spread
from hybridflow.kit.vocabulary import VocabularyPart


def role_outputs(
    chunk: Any,
    hidden: torch.Tensor,
    micro: MicroBatch,
    starts: torch.Tensor,
    needs: Sequence[str],
    temperature: float,
    vocab: int,
) -> dict[str, torch.Tensor]:
    """Return a micro-batch's outputs from the hidden states of the last pipeline stage.

    They are the same on every tp rank. hidden: [S, B, H], or [S / tp, B, H] under sequence
    parallelism; starts: int64 [rows], the place of each row's first token among hidden's positions
    in flat order (row by row); vocab: the size without padding.
    """
    group = chunk.pg_collection.tp
    config = chunk.config

    # A policy's head is spread over tp by vocabulary; a head of one output is whole on each rank.
    is_spread = hasattr(chunk, "output_layer")
    if config.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(
            hidden, tensor_parallel_output_grad=is_spread, group=group
        )
    flat = hidden.transpose(0, 1)
    # After the transposition: Megatron sums contiguous gradients only.
    if is_spread and not config.sequence_parallel:
        flat = copy_to_tensor_model_parallel_region(flat, group=group)

    if "scores" in needs:
        ends = starts + micro.prompt_lengths + micro.response_lengths - 1
        states = pick(flat, ends.to(hidden.device))
        return {"scores": chunk.score(states)[:, 0].float()}

    # For each response token: its index in the outputs (row and t), the flat index of the state
    # before it in hidden, and its own in ids. One transfer to the device copies all four.
    rows, steps = micro.places
    before = starts[rows] + micro.prompt_lengths[rows] + steps - 1
    own = micro.response_starts[rows] + steps
    places = torch.stack([rows, steps, before, own])
    rows, steps, before, own = places.to(hidden.device, non_blocking=True)
    states = pick(flat, before)
    shape = (micro.rows, micro.width)
    if "values" in needs:
        values = chunk.score(states)[:, 0].float()
        return {"values": spread(values, rows, steps, shape)}

    # A tied head has no weight of its own.
    weight = None
    if chunk.share_embeddings_and_output_weights:
        weight = chunk.shared_embedding_or_output_weight()
    targets = micro.ids.flatten().index_select(0, own)
    topk = None if micro.topk_ids is None else micro.topk_ids[rows, steps]
    head = chunk.output_layer.weight if weight is None else weight
    outputs = head_outputs(head, group, vocab, states, targets, needs, temperature, topk)
    return {name: spread(value, rows, steps, shape) for name, value in outputs.items()}


def head_outputs(
    weight: torch.Tensor,
    group: dist.ProcessGroup,
    vocab: int,
    states: torch.Tensor,
    targets: torch.Tensor,
    needs: Sequence[str],
    temperature: float,
    topk_ids: torch.Tensor | None,
) -> dict[str, torch.Tensor]:
    """Return `VocabularyPart.outputs` of states [N, H], with few logits in memory at a time.

    weight: this rank's rows of the head, equally many on each rank of `group`. Rows from `vocab` on
    are padding and are ignored.
    """
    rows = weight.shape[0]
    part = VocabularyPart(group, group.rank() * rows, vocab)

    def piece(states, targets, topk_ids):
        # Without a name here, the logits are freed as soon as something else is made of them.
        return dict(part.outputs(F.linear(states, weight), targets, needs, temperature, topk_ids))

    return in_pieces(piece, rows, states, targets, topk_ids)
