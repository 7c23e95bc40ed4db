"""Log-probabilities over a vocabulary that is spread over ranks, without gathering the logits.

With s = x - max x over the logits x of one token, and Z the sum of exp(s) over the vocabulary:

    log p(y) = s[y] - log Z
    entropy  = -sum p log p = -sum (exp(s) / Z) (s - log Z) = log Z - sum(exp(s) s) / Z

A rank has the logits of its rows of the head. The maximum, Z, sum(exp(s) s) and s[y] are each one
all-reduce of [N] numbers over the tp ranks, for N tokens.
"""

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
    head = VocabularyHead(chunk.output_layer.weight if weight is None else weight, group, vocab)
    targets = micro.ids.flatten().index_select(0, own)
    topk = None if micro.topk_ids is None else micro.topk_ids[rows, steps]
    outputs = head.pieces(states, targets, needs, temperature, topk)
    return {name: spread(value, rows, steps, shape) for name, value in outputs.items()}


class VocabularyHead:
    """This rank's rows of the head: `first` .. `first` + len(weight) of the vocabulary.

    Rows from `vocab` on are padding and are ignored.
    """

    def __init__(self, weight: torch.Tensor, group: dist.ProcessGroup, vocab: int):
        """weight: [rows, H], equally many on each rank of `group`."""
        self.weight = weight
        self.group = group
        self.vocab = vocab
        self.first = group.rank() * weight.shape[0]

    def pieces(
        self,
        states: torch.Tensor,
        targets: torch.Tensor,
        needs: Sequence[str],
        temperature: float,
        topk_ids: Any,
    ) -> dict[str, torch.Tensor]:
        """Return the results of `outputs`, with at most LOGITS_AT_ONCE logits in memory at a time.

        Where there are more, they are computed in pieces, and once more in the backward pass
        instead of being kept.
        """

        def piece(states, targets, topk_ids):
            return dict(self.outputs(states, targets, needs, temperature, topk_ids))

        size = max(modeling.LOGITS_AT_ONCE // self.weight.shape[0], 1)
        if len(states) <= size:
            return piece(states, targets, topk_ids)

        # Disable early stop: a rank that has only padding recomputes fewer tensors, so it would
        # stop sooner and leave the other ranks waiting in their all-reduces.
        cuts = [slice(start, start + size) for start in range(0, len(states), size)]
        with set_checkpoint_early_stop(False):
            parts = [
                checkpoint(
                    piece,
                    states[cut],
                    targets[cut],
                    topk_ids if topk_ids is None else topk_ids[cut],
                    use_reentrant=False,
                )
                for cut in cuts
            ]
        outputs = {}
        for name in parts[0]:
            outputs[name] = torch.cat([part[name] for part in parts])
        return outputs

    def outputs(
        self,
        states: torch.Tensor,
        targets: torch.Tensor,
        needs: Sequence[str],
        temperature: float,
        topk_ids: Any,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, float32 [N, ...]) for each need; topk:K also gives topk_ids, int64.

        states: [N, H]; targets: int64 [N]; topk_ids: int64 [N, K] or None. The module's docstring
        has the formulas. A collective call over the tp ranks.
        """
        # Greedy sampling (temperature 0) has the log-probabilities of temperature 1.
        logits = F.linear(states, self.weight).float()
        if temperature not in (0.0, 1.0):
            logits = logits / temperature

        # Padding is cut off; a rank may have only padding.
        real = max(min(self.vocab - self.first, logits.shape[-1]), 0)
        if real < logits.shape[-1]:
            logits = logits[:, :real]

        # The maximum only keeps exp from overflowing: it needs no gradient.
        with torch.no_grad():
            if real:
                peak = logits.amax(-1)
            else:
                peak = logits.new_full((len(logits),), -torch.inf)
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
                count = min(int(need[5:]), self.vocab)
                ids, values = self._largest(shifted, count)
                yield "topk_ids", ids
                yield "topk_logprobs", values - log_total[:, None]

    def _sum(self, value: torch.Tensor) -> torch.Tensor:
        """Return the sum over the tp ranks; each rank gets the whole gradient."""
        return reduce_from_tensor_model_parallel_region(value, group=self.group)

    def _at(self, values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return values[n, ids[n, k]] as [N, K], from the ranks that have these columns."""
        is_here = (ids >= self.first) & (ids < self.first + values.shape[-1])

        # A rank without columns adds zeros that depend on its values: backward passes are equal.
        if not values.shape[-1]:
            zeros = values.new_zeros(ids.shape)
            return self._sum(values.sum(-1, keepdim=True) * 0 + zeros)
        columns = torch.where(is_here, ids - self.first, 0)
        picked = values.gather(-1, columns)
        return self._sum(torch.where(is_here, picked, 0.0))

    def _largest(self, values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (ids, values), each [N, count], of the largest values over all ranks."""
        # A rank with fewer columns than `count` fills up with candidates that never win.
        candidates = values.detach()
        if (lacking := count - candidates.shape[-1]) > 0:
            candidates = F.pad(candidates, (0, lacking), value=-torch.inf)
        best, ids = candidates.topk(count, dim=-1)

        # The largest of all are among the largest of each rank.
        size = self.group.size()
        all_best = [torch.empty_like(best) for _ in range(size)]
        all_ids = [torch.empty_like(ids) for _ in range(size)]
        dist.all_gather(all_best, best.contiguous(), group=self.group)
        dist.all_gather(all_ids, (ids + self.first).contiguous(), group=self.group)
        _, order = torch.cat(all_best, -1).topk(count, dim=-1)
        chosen = torch.cat(all_ids, -1).gather(-1, order)
        return chosen, self._at(values, chosen)
