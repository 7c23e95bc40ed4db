"""RLOO: REINFORCE with the mean reward of the prompt's other responses as its baseline.

The source is arXiv:2402.14740.
"""

from __future__ import annotations

import attrs

from hybridflow.algorithms import functional as F
from hybridflow.algorithms.policy import AGGREGATIONS, ClippedConfig, CorrectionConfig
from hybridflow.algorithms.policy_gradient import PolicyGradient, PretrainConfig
from hybridflow.algorithms.reference_kl import RewardKLConfig
from hybridflow.core.contracts.step import StepContext
from hybridflow.core.validators import at_least


@attrs.frozen
class RLOOConfig(ClippedConfig, CorrectionConfig, RewardKLConfig, PretrainConfig):
    """Settings of REINFORCE leave-one-out."""

    group_size: int = attrs.field(default=4, validator=at_least(2))
    """Responses per prompt, k in the paper."""
    how: str = attrs.field(default="seq-mean-token-sum", validator=AGGREGATIONS)
    """How the loss is averaged; the paper sums over a response's tokens, as it is one action."""


class RLOO(PolicyGradient):
    """RLOO's step: the tokens of a response share its advantage (arXiv:2402.14740)."""

    Config = RLOOConfig

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

    def advantages(self, scores, group, loss_mask, old_logprobs=None, ref_logprobs=None):
        """Return for every token its response's advantage.

        It is the response's score less its KL penalty, minus the mean of that over the other
        responses to the prompt.
        """
        penalty, figures = self.kl.penalty(loss_mask, old_logprobs, ref_logprobs)
        advantages = F.leave_one_out(scores - penalty.sum(1), group)
        return {"advantages": advantages[:, None] * loss_mask, **figures}
