"""Log-probabilities over a vocabulary that is spread over ranks, without gathering the logits.

With s = x - max x over the logits x of one token, and Z the sum of exp(s) over the vocabulary:

    log p(y) = s[y] - log Z
    entropy  = -sum p log p = -sum (exp(s) / Z) (s - log Z) = log Z - sum(exp(s) s) / Z

A rank has the logits of its rows of the head. The maximum, Z, sum(exp(s) s) and s[y] are each one
all-reduce of [N] numbers over the ranks, for N tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs
import torch
import torch.distributed as dist
import torch.nn.functional as F


def scaled(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return logits / temperature in float32.

    Greedy decoding (temperature 0) has the log-probabilities of temperature 1.
    """
    logits = logits.float()
    return logits if temperature in (0.0, 1.0) else logits / temperature


@attrs.frozen
class VocabularyPart:
    """The columns of the logits that this rank has: those from `first` on."""

    group: dist.ProcessGroup
    first: int
    vocab: int
    """The size of the whole vocabulary. Columns beyond it are padding and are ignored."""

    def outputs(
        self,
        logits: torch.Tensor,
        targets: torch.Tensor,
        needs: Sequence[str],
        temperature: float,
        topk_ids: torch.Tensor | None,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, float32 [N, ...]) for each need; topk:K also gives topk_ids, int64.

        logits: [N, columns], equally many columns on each rank; targets: int64 [N]; topk_ids:
        int64 [N, K] or None. The results are the same on every rank, and so must be what is made of
        them: a rank's logits get their gradient from its own results. A collective call.
        """
        logits = scaled(logits, temperature)

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
        del logits
        exp = shifted.exp()
        total = self._sum(exp.sum(-1))
        log_total = total.log()

        if "logprobs" in needs:
            yield "logprobs", self._at(shifted, targets[:, None])[:, 0] - log_total
        if "entropy" in needs:
            yield "entropy", log_total - self._sum((exp * shifted).sum(-1)) / total
        if "topk_logprobs" in needs:
            assert topk_ids is not None
            yield "topk_logprobs", self._at(shifted, topk_ids) - log_total[:, None]
        for need in needs:
            if need.startswith("topk:"):
                count = min(int(need[5:]), self.vocab)
                ids, values = self._largest(shifted, count)
                yield "topk_ids", ids
                yield "topk_logprobs", values - log_total[:, None]

    def _sum(self, value: torch.Tensor) -> torch.Tensor:
        """Return the sum over the ranks."""
        summed: torch.Tensor = _SumOverRanks.apply(value, self.group)
        return summed

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


class _SumOverRanks(torch.autograd.Function):
    """The sum of a tensor over ranks that all go on with the same result.

    Each rank's gradient of it is the whole one, which the backward pass hands on.
    """

    @staticmethod
    def forward(ctx, value, group):
        value = value.clone()
        dist.all_reduce(value, group=group)
        return value

    @staticmethod
    def backward(ctx, grad):
        return grad, None
