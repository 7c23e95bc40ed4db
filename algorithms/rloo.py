"""RLOO: REINFORCE whose baseline is the mean reward of the other responses to the prompt (arXiv:2402.14740)."""

from __future__ import annotations

import attrs

from hybridflow.algorithms import functional as F
from hybridflow.algorithms.policy import AGGREGATIONS, RewardKLConfig
from hybridflow.algorithms.policy_gradient import PolicyGradient
from hybridflow.core.contracts.step import StepContext
from hybridflow.core.validators import at_least


@attrs.frozen
class RLOOConfig(RewardKLConfig):
    """REINFORCE leave-one-out."""

    group_size: int = attrs.field(default=4, validator=at_least(2))
    """Responses per prompt, k in the paper."""
    how: str = attrs.field(default="seq-mean-token-sum", validator=AGGREGATIONS)
    """A response is one action: its tokens' losses add up (the paper's); or another."""


class RLOO(PolicyGradient):
    """Advantage of every token: the response's reward, its KL paid, less the mean of the others."""

    Config = RLOOConfig

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
        advantages = F.leave_one_out(scores - penalty.sum(1), group)
        return {"advantages": advantages[:, None] * loss_mask, **figures}
