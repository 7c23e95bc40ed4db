"""REINFORCE++: returns whitened over the whole batch instead of a critic or a group's spread (arXiv:2501.03262)."""

from __future__ import annotations

from typing import ClassVar

import attrs

from hybridflow.algorithms import functional as F
from hybridflow.algorithms.policy import KL_KINDS, PolicyConfig, RewardKLConfig
from hybridflow.algorithms.policy_gradient import PolicyGradient
from hybridflow.core.contracts.step import StepContext
from hybridflow.core.validators import at_least, fraction, non_negative


@attrs.frozen
class ReinforcePPConfig(RewardKLConfig):
    """REINFORCE++: each token pays its KL, returns are whitened over the batch."""

    gamma: float = attrs.field(default=1.0, validator=fraction)
    """Discount per token."""
    kl_coef: float = attrs.field(default=0.01, validator=non_negative)
    """beta: weight of the KL to the reference; 0 needs no reference."""


class ReinforcePP(PolicyGradient):
    """Advantage of a token: the rewards from it on, whitened over the batch."""

    Config: ClassVar[type] = ReinforcePPConfig

    def step(self, ctx: StepContext) -> None:
        c, losses = self.config, self.losses()
        batch = ctx.actor.generate(ctx.prompts(c.prompts_per_step).repeat(c.group_size))
        batch = batch.join(ctx.reward.score(batch), *self.logprobs(ctx, batch))
        advantages = ctx.compute(self.advantages, batch)
        for mini in self.minibatches(ctx, batch.join(advantages)):
            ctx.actor.update([(mini, losses["actor"]), *self.pretraining(ctx)])
        self.kl.follow(advantages, batch.rows)

    def advantages(
        self, scores, loss_mask, old_logprobs=None, ref_logprobs=None, token_scores=None
    ):
        penalty, figures = self.kl.penalty(loss_mask, old_logprobs, ref_logprobs)
        rewards = F.token_rewards(
            scores if token_scores is None else token_scores, penalty, loss_mask, beta=1.0
        )
        returns = F.discounted_returns(rewards, loss_mask, self.config.gamma)
        return {"advantages": F.whiten(returns, loss_mask), **figures}


@attrs.frozen
class ReinforcePPBaselineConfig(PolicyConfig):
    """REINFORCE++ with the group's mean as the baseline and the KL in the loss."""

    group_size: int = attrs.field(default=8, validator=at_least(2))
    """Responses per prompt."""
    kl_coef: float = attrs.field(default=0.01, validator=non_negative)
    """beta: weight of the KL to the reference; 0 needs no reference."""
    kl_kind: str = attrs.field(default="k2", validator=KL_KINDS)
    """The estimator of that KL (k2, the paper's: its gradient is the reverse KL's); k1 in the reward only."""


class ReinforcePPBaseline(ReinforcePP):
    """REINFORCE++'s step with another advantage: the score less its group's mean, whitened over the batch's tokens."""

    Config = ReinforcePPBaselineConfig

    def advantages(self, scores, group, loss_mask, old_logprobs=None, ref_logprobs=None):  # type: ignore[override]
        penalty, figures = self.kl.penalty(loss_mask, old_logprobs, ref_logprobs)
        centred = F.group_normalized(scores - penalty.sum(1), group, "none")
        return {"advantages": F.whiten(centred[:, None] * loss_mask, loss_mask), **figures}
