"""DAPO: GRPO that clips higher, averages over tokens, punishes overlong responses and leaves out groups from which nothing
can be learnt, drawing more prompts until the batch is full (arXiv:2503.14476)."""

from __future__ import annotations

import attrs
import numpy as np
import torch

from hybridflow.algorithms import functional as F
from hybridflow.algorithms.grpo import GRPO, GRPOConfig
from hybridflow.algorithms.policy import AGGREGATIONS
from hybridflow.core.contracts.step import StepContext
from hybridflow.core.validators import at_least, non_negative, positive
from hybridflow.core.values.batch import Batch


@attrs.frozen
class DAPOConfig(GRPOConfig):
    """Decoupled clip and dynamic sampling."""

    clip_high: float = attrs.field(default=0.28, validator=positive)
    how: str = attrs.field(default="token-mean", validator=AGGREGATIONS)
    """Mean over all tokens (the paper's); or another."""
    max_draws: int = attrs.field(default=10, validator=at_least(1))
    """Times that prompts are drawn for a step, prompts_per_step each; a step whose draws are used up trains on what it has."""
    overlong_cache: int = attrs.field(default=0, validator=non_negative)
    """The last so many of sampling.max_tokens are punished by up to -1 of the score (eq. 13); 0: no punishment."""


class DAPO(GRPO):
    """GRPO's advantages on groups of unequal scores, in which the punishment does not count.

    Metrics: draws; kept, the share of groups that were unequal; filled, below 1 where max_draws did not fill the batch.
    """

    Config = DAPOConfig
    limit = 0
    """sampling.max_tokens of the run."""

    def step(self, ctx: StepContext) -> None:
        c, losses, full = self.config, self.losses(), self.rows_per_step
        kept: list[Batch] = []
        draws = found = 0
        while found < full and draws < c.max_draws:  # dynamic sampling (algorithm 1, lines 4 to 8)
            batch = ctx.actor.generate(ctx.prompts(c.prompts_per_step).repeat(c.group_size))
            batch = batch.join(ctx.reward.score(batch), *self.logprobs(ctx, batch))
            kept.append(batch.take(self.unequal(batch)))
            found += kept[-1].rows
            draws += 1
        ctx.log(draws=draws, kept=found / (draws * full), filled=min(found / full, 1.0))
        if not found:  # there is nothing to learn from
            return
        batch = Batch.concat([part for part in kept if part.rows]).take(slice(0, full))
        self.limit = ctx.sampling.max_tokens
        advantages = ctx.compute(self.advantages, batch)
        for mini in self.minibatches(ctx, batch.join(advantages)):
            ctx.actor.update([(mini, losses["actor"]), *self.pretraining(ctx)])
        self.kl.follow(advantages, batch.rows)

    def advantages(self, scores, group, loss_mask, old_logprobs=None, ref_logprobs=None):
        if self.config.overlong_cache:
            scores = scores + F.overlong_punishment(
                loss_mask.sum(1), self.limit, self.config.overlong_cache
            )
        return super().advantages(scores, group, loss_mask, old_logprobs, ref_logprobs)

    def unequal(self, batch: Batch) -> np.ndarray:
        """Rows whose group has scores that differ, bool [B]."""
        scores = torch.as_tensor(batch["scores"].values).view(-1, self.config.group_size)
        return (scores.amax(1) > scores.amin(1)).repeat_interleave(self.config.group_size).numpy()
