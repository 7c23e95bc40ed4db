"""REINFORCE++: returns are whitened over the batch, which replaces a critic.

The source is arXiv:2501.03262.
"""

from __future__ import annotations

from typing import ClassVar

import attrs

from hybridflow.algorithms import functional as F
from hybridflow.algorithms.policy import ClippedConfig, CorrectionConfig
from hybridflow.algorithms.policy_gradient import PolicyGradient, PretrainConfig
from hybridflow.algorithms.reference_kl import KL_KINDS, KLConfig, RewardKLConfig
from hybridflow.core.contracts.step import StepContext
from hybridflow.core.validators import at_least, fraction, non_negative


@attrs.frozen
class ReinforcePPConfig(ClippedConfig, CorrectionConfig, RewardKLConfig, PretrainConfig):
    """Settings of REINFORCE++, which subtracts the KL from each token's reward."""

    gamma: float = attrs.field(default=1.0, validator=fraction)
    """Discount per token."""
    kl_coef: float = attrs.field(default=0.01, validator=non_negative)
    """beta: weight of the KL to the reference; 0 needs no reference."""


class ReinforcePP(PolicyGradient):
    """REINFORCE++'s step (arXiv:2501.03262)."""

    Config: ClassVar[type] = ReinforcePPConfig

    def step(self, ctx: StepContext) -> None:
        config = self.config
        losses = self.losses()

        # Generation and inference.
        prompts = ctx.prompts(config.prompts_per_step)
        batch = ctx.actor.generate(prompts.repeat(config.group_size))
        inferred = [ctx.reward.score(batch)]
        if config.kl_coef:
            inferred.append(ctx.ref.logprobs(batch))
        if self.reads_old_logprobs:
            inferred.append(ctx.actor.logprobs(batch))
        batch = batch.join(*inferred)
        advantages = ctx.compute(self.advantages, batch)

        # Training.
        for mini in self.minibatches(ctx, batch.join(advantages)):
            ctx.actor.update([(mini, losses["actor"]), *self.pretraining(ctx)])

        # An adaptive KL coefficient moves once a step.
        self.kl.follow(advantages, batch.rows)

    def advantages(
        self, scores, loss_mask, old_logprobs=None, ref_logprobs=None, token_scores=None
    ):
        """Return as the advantage of each token its discounted return, whitened over the batch.

        `token_scores` [B, T], where there are any, are used instead of `scores` [B].
        """
        # Whitening over the batch replaces a critic's baseline.
        penalty, figures = self.kl.penalty(loss_mask, old_logprobs, ref_logprobs)
        scores = scores if token_scores is None else token_scores
        rewards = F.token_rewards(scores, penalty, loss_mask, beta=1.0)
        returns = F.discounted_returns(rewards, loss_mask, self.config.gamma)
        return {"advantages": F.whiten(returns, loss_mask), **figures}


@attrs.frozen
class ReinforcePPBaselineConfig(ClippedConfig, CorrectionConfig, KLConfig, PretrainConfig):
    """Settings of REINFORCE++ with a group's mean as the baseline and the KL in the loss."""

    group_size: int = attrs.field(default=8, validator=at_least(2))
    """Responses per prompt."""
    kl_coef: float = attrs.field(default=0.01, validator=non_negative)
    """beta: weight of the KL to the reference; 0 needs no reference."""
    kl_kind: str = attrs.field(default="k2", validator=KL_KINDS)
    """The estimator of that KL; the paper's k2 has the gradient of the reverse KL; k1 in the reward
    only."""


class ReinforcePPBaseline(ReinforcePP):
    """REINFORCE++-baseline: the same step with the group's mean as the baseline."""

    Config = ReinforcePPBaselineConfig

    def advantages(  # type: ignore[override]
        self, scores, group, loss_mask, old_logprobs=None, ref_logprobs=None
    ):
        """Return for every token its response's score less the group's mean, whitened."""
        penalty, figures = self.kl.penalty(loss_mask, old_logprobs, ref_logprobs)
        # The group's mean is the baseline; the batch's spread is the scale.
        centred = F.group_normalized(scores - penalty.sum(1), group, "none")
        return {"advantages": F.whiten(centred[:, None] * loss_mask, loss_mask), **figures}
