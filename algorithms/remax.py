"""ReMax: REINFORCE whose baseline is the score of the greedy response; no critic (arXiv:2310.10505)."""

from __future__ import annotations

import attrs

from hybridflow.algorithms import functional as F
from hybridflow.algorithms.policy import AGGREGATIONS, RewardKLConfig
from hybridflow.algorithms.policy_gradient import PolicyGradient
from hybridflow.core.contracts.step import StepContext


@attrs.frozen
class ReMaxConfig(RewardKLConfig):
    """REINFORCE with a greedy baseline."""

    how: str = attrs.field(default="seq-mean-token-sum", validator=AGGREGATIONS)
    """A response's tokens' losses add up (the paper's); or another mean."""


class ReMax(PolicyGradient):
    """Advantage of a token: the rewards from it on, less the score of the prompt's greedy response."""

    Config = ReMaxConfig

    def step(self, ctx: StepContext) -> None:
        c, losses = self.config, self.losses()
        prompts = ctx.prompts(c.prompts_per_step)
        batch = ctx.actor.generate(prompts.repeat(c.group_size))
        batch = batch.join(ctx.reward.score(batch), *self.logprobs(ctx, batch))
        with ctx.aside():  # the metrics are those of the sampled responses
            greedy = ctx.reward.score(ctx.actor.generate(prompts, greedy=True)).rename(
                scores="baseline_scores"
            )
        batch = batch.join(greedy.repeat(c.group_size))
        advantages = ctx.compute(self.advantages, batch)
        for mini in self.minibatches(ctx, batch.join(advantages)):
            ctx.actor.update([(mini, losses["actor"]), *self.pretraining(ctx)])
        self.kl.follow(advantages, batch.rows)

    def advantages(self, scores, baseline_scores, loss_mask, old_logprobs=None, ref_logprobs=None):
        penalty, figures = self.kl.penalty(loss_mask, old_logprobs, ref_logprobs)
        rewards = F.token_rewards(scores, penalty, loss_mask, beta=1.0)
        returns = F.discounted_returns(rewards, loss_mask, gamma=1.0)
        return {
            "advantages": (returns - baseline_scores[:, None]) * loss_mask,
            "baseline": baseline_scores.mean(),
            **figures,
        }
