"""What the ranks of tests of a spread vocabulary run."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from hybridflow.kit.huggingface import modeling
from hybridflow.kit.vocabulary import VocabularyPart


def head_outputs(
    rank: int, world: int, weight: torch.Tensor, vocab: int, states: torch.Tensor, targets: torch.Tensor,
    given: torch.Tensor, needs: Sequence[str], temperature: float, at_once: int,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Outputs of a head of which each rank has a part, and the gradients of the sum of those that have one."""
    before, modeling.LOGITS_AT_ONCE = modeling.LOGITS_AT_ONCE, at_once
    rows = weight.chunk(world)[rank].clone().requires_grad_()
    states = states.clone().requires_grad_()
    part = VocabularyPart(dist.group.WORLD, rank * len(rows), vocab)

    def piece(states, targets, given):
        return dict(part.outputs(states @ rows.T, targets, needs, temperature, given))

    try:
        found = modeling.in_pieces(piece, len(rows), states, targets, given)
        sum(value.sum() for value in found.values() if value.requires_grad).backward()
    finally:
        modeling.LOGITS_AT_ONCE = before
    gradients = {"gradient of states": states.grad, "gradient of weight": rows.grad}
    return {name: value.detach() for name, value in (found | gradients).items()}
