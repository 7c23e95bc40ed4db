"""Log-probabilities over a vocabulary that is spread over ranks, without gathering the logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from hybridflow.core.contracts.training import MicroBatch
from hybridflow.kit.huggingface import modeling
from hybridflow.kit.huggingface.modeling import pick, spread


def role_outputs(
    chunk: Any, hidden: torch.Tensor, micro: MicroBatch, starts: torch.Tensor, needs: Sequence[str], temperature: float,
    vocab: int,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Outputs of a micro-batch from the last stage's hidden states, the same on every tp rank.

    hidden: [S, B, H] ([S / tp, B, H] under sequence parallelism); starts: [rows], where in the flat order (row by row)
    of hidden's positions each row's first token is; vocab: without padding.
    """
    group, config = chunk.pg_collection.tp, chunk.config
    split = hasattr(
        chunk, "output_layer"
    )  # over the vocabulary; a head of one output is on every rank
    if config.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(
            hidden, tensor_parallel_output_grad=split, group=group
        )
    flat = hidden.transpose(0, 1)
    if (
        split and not config.sequence_parallel
    ):  # behind the transposition: Megatron sums contiguous gradients alone
        flat = copy_to_tensor_model_parallel_region(flat, group=group)
    if "scores" in needs:
        ends = starts + micro.prompt_lengths + micro.response_lengths - 1
        return {"scores": chunk.score(pick(flat, ends.to(hidden.device)))[:, 0].float()}
    rows, at = micro.places
    before = starts[rows] + micro.prompt_lengths[rows] + at - 1
    target = rows * micro.ids.shape[1] + micro.prompt_lengths[rows] + at
    rows, at, before, target = torch.stack([rows, at, before, target]).to(
        hidden.device, non_blocking=True
    )
    states, shape = pick(flat, before), (len(micro.ids), micro.width)
    if "values" in needs:
        return {"values": spread(chunk.score(states)[:, 0].float(), rows, at, shape)}
    weight = (
        chunk.shared_embedding_or_output_weight()
        if chunk.share_embeddings_and_output_weights
        else None
    )
    head = VocabularyHead(chunk.output_layer.weight if weight is None else weight, group, vocab)
    wanted = micro.ids.flatten().index_select(0, target)
    topk = None if micro.topk_ids is None else micro.topk_ids[rows, at]
    outputs = head.pieces(states, wanted, needs, temperature, topk)
    return {name: spread(value, rows, at, shape) for name, value in outputs.items()}


class VocabularyHead:
    """Rows first .. first + len(weight) of the head, on this rank; those from `vocab` on are padding."""

    def __init__(self, weight: torch.Tensor, group: dist.ProcessGroup, vocab: int):
        self.weight, self.group, self.vocab = weight, group, vocab
        self.first = group.rank() * weight.shape[0]

    def pieces(
        self,
        states: torch.Tensor,
        targets: torch.Tensor,
        needs: Sequence[str],
        temperature: float,
        topk_ids: Any,
    ) -> dict[str, torch.Tensor]:
        """Logits in pieces when they are many, made again in the backward instead of kept."""

        def piece(states, targets, topk_ids):
            return dict(self.outputs(states, targets, needs, temperature, topk_ids))

        size = max(modeling.LOGITS_AT_ONCE // self.weight.shape[0], 1)
        if len(states) <= size:
            return piece(states, targets, topk_ids)
        cuts = [slice(start, start + size) for start in range(0, len(states), size)]
        with set_checkpoint_early_stop(
            False
        ):  # a rank that has padding alone needs less, and would leave the others waiting
            found = [
                checkpoint(
                    piece,
                    states[c],
                    targets[c],
                    topk_ids if topk_ids is None else topk_ids[c],
                    use_reentrant=False,
                )
                for c in cuts
            ]
        return {name: torch.cat([f[name] for f in found]) for name in found[0]}

    def outputs(
        self,
        states: torch.Tensor,
        targets: torch.Tensor,
        needs: Sequence[str],
        temperature: float,
        topk_ids: Any,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """states [N, H], targets [N], topk_ids [N, K] -> (name, [N, ...])."""
        logits = F.linear(states, self.weight).float()
        if temperature not in (0.0, 1.0):
            logits = logits / temperature
        real = max(min(self.vocab - self.first, logits.shape[-1]), 0)
        if real < logits.shape[-1]:
            logits = logits[:, :real]
        with torch.no_grad():
            peak = logits.amax(-1) if real else logits.new_full((len(logits),), -torch.inf)
            dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=self.group)
        shifted = logits - peak[:, None]
        exp = shifted.exp()
        total = self._sum(exp.sum(-1))
        log_total = total.log()
        if "logprobs" in needs:
            yield "logprobs", self._at(shifted, targets[:, None])[:, 0] - log_total
        if "entropy" in needs:
            yield "entropy", log_total - self._sum((exp * shifted).sum(-1)) / total
        if "topk_logprobs" in needs:
            yield "topk_logprobs", self._at(shifted, topk_ids) - log_total[:, None]
        for need in needs:
            if need.startswith("topk:"):
                ids, values = self._largest(shifted, min(int(need[5:]), self.vocab))
                yield "topk_ids", ids
                yield "topk_logprobs", values - log_total[:, None]

    def _sum(self, value: torch.Tensor) -> torch.Tensor:
        """Over the ranks; the gradient goes to each of them whole."""
        return reduce_from_tensor_model_parallel_region(value, group=self.group)

    def _at(self, values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """values[n, ids[n, k]], whichever rank has it."""
        here = (ids >= self.first) & (ids < self.first + values.shape[-1])
        if not values.shape[-1]:
            return self._sum(values.sum(-1, keepdim=True) * 0 + values.new_zeros(ids.shape))
        found = values.gather(-1, torch.where(here, ids - self.first, 0))
        return self._sum(torch.where(here, found, 0.0))

    def _largest(self, values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids, values), [N, count], of the largest over all ranks."""
        mine = values.detach()
        if (lacking := count - mine.shape[-1]) > 0:
            mine = F.pad(mine, (0, lacking), value=-torch.inf)
        best, ids = mine.topk(count, dim=-1)
        every = [(torch.empty_like(best), torch.empty_like(ids)) for _ in range(self.group.size())]
        dist.all_gather([b for b, _ in every], best.contiguous(), group=self.group)
        dist.all_gather([i for _, i in every], (ids + self.first).contiguous(), group=self.group)
        _, order = torch.cat([b for b, _ in every], -1).topk(count, dim=-1)
        chosen = torch.cat([i for _, i in every], -1).gather(-1, order)
        return chosen, self._at(values, chosen)
