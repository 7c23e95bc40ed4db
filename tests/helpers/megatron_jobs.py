"""What the ranks of tests of Megatron's parts run; imports Megatron where it is used."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from hybridflow.backends.megatron.cpu import on_cpu
from hybridflow.core.contracts.worker import RankContext
from hybridflow.core.values.parallel import ParallelLayout
from hybridflow.kit.huggingface import modeling

CPU = torch.device("cpu")


def groups_of(
    rank: int, world: int, layout: ParallelLayout, names: Sequence[str]
) -> dict[str, list[int]]:
    """The ranks of this rank's process groups."""
    from hybridflow.backends.megatron.groups import group_collection

    context = RankContext("actor", rank, layout, CPU)
    collection = group_collection(context)
    assert group_collection(context).tp is collection.tp  # made once
    return {name: dist.get_process_group_ranks(getattr(collection, name)) for name in names}


def head_outputs(
    rank: int, world: int, weight: torch.Tensor, vocab: int, states: torch.Tensor, targets: torch.Tensor,
    given: torch.Tensor, needs: Sequence[str], temperature: float, at_once: int,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Outputs of a head of which each rank has a part, and the gradients of the sum of those that have one."""
    from hybridflow.backends.megatron.outputs import VocabularyHead

    before, modeling.LOGITS_AT_ONCE = modeling.LOGITS_AT_ONCE, at_once
    part = weight.chunk(world)[rank].clone().requires_grad_()
    states = states.clone().requires_grad_()
    try:
        with on_cpu(CPU):
            head = VocabularyHead(part, dist.group.WORLD, vocab)
            found = head.pieces(states, targets, needs, temperature, given)
            sum(value.sum() for value in found.values() if value.requires_grad).backward()
    finally:
        modeling.LOGITS_AT_ONCE = before
    gradients = {"gradient of states": states.grad, "gradient of weight": part.grad}
    return {name: value.detach() for name, value in (found | gradients).items()}
