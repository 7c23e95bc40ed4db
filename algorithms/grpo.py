"""GRPO: several responses per prompt, each judged against its group; no critic (DeepSeekMath, arXiv:2402.03300)."""

from __future__ import annotations

from typing import ClassVar

import attrs

from hybridflow.algorithms import functional as F
from hybridflow.algorithms.policy import AGGREGATIONS, PolicyConfig, one_of
from hybridflow.algorithms.policy_gradient import PolicyGradient
from hybridflow.core.contracts.step import StepContext
from hybridflow.core.validators import at_least


@attrs.frozen
class GRPOConfig(PolicyConfig):
    """Group-relative policy optimisation."""

    group_size: int = attrs.field(default=8, validator=at_least(2))
    """Responses per prompt, G in the paper."""
    scale: str = attrs.field(default="std", validator=one_of(("std", "none")))
    """Divide a group's centred scores by their standard deviation, or not."""
    how: str = attrs.field(default="seq-mean-token-mean", validator=AGGREGATIONS)
    """Mean over each response, then over responses (the paper's); or another."""


class GRPO(PolicyGradient):
    """Advantage of every token: the response's score, normalised within its group (eq. 4 and section 4.1.2)."""

    Config: ClassVar[type] = GRPOConfig

    def step(self, ctx: StepContext) -> None:
        c, losses = self.config, self.losses()
        batch = ctx.actor.generate(ctx.prompts(c.prompts_per_step).repeat(c.group_size))
        batch = batch.join(ctx.reward.score(batch), *self.logprobs(ctx, batch))
        advantages = ctx.compute(self.advantages, batch)
        for mini in self.minibatches(ctx, batch.join(advantages)):
            ctx.actor.update([(mini, losses["actor"]), *self.pretraining(ctx)])
        self.kl.follow(advantages, batch.rows)

    def advantages(self, scores, group, loss_mask, old_logprobs=None, ref_logprobs=None):
        penalty, figures = self.kl.penalty(loss_mask, old_logprobs, ref_logprobs)
        normalized = F.group_normalized(scores - penalty.sum(1), group, self.config.scale)
        return {"advantages": normalized[:, None] * loss_mask, **figures}
