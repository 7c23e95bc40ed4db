"""ReMax: REINFORCE whose baseline is the score of the greedy response; no critic (arXiv:2310.10505)."""

from __future__ import annotations

import attrs

from hybridflow.algorithms import functional as F
from hybridflow.algorithms.policy import AGGREGATIONS, RewardKLConfig
from hybridflow.algorithms.policy_gradient import PolicyGradient


@attrs.frozen
class ReMaxConfig(RewardKLConfig):
    """REINFORCE with a greedy baseline."""

    how: str = attrs.field(default="seq-mean-token-sum", validator=AGGREGATIONS)
    """A response's tokens' losses add up (the paper's); or another mean."""


class ReMax(PolicyGradient):
    """Advantage of a token: the rewards from it on, less the score of the prompt's greedy response."""

    Config = ReMaxConfig

    def step(self, ctx) -> None:
        prompts = ctx.prompts(self.config.prompts_per_step)
        batch = self.sample(ctx, prompts)
        with ctx.aside():  # the metrics are those of the sampled responses
            greedy = ctx.reward.score(ctx.actor.generate(prompts, greedy=True)).rename(scores="baseline_scores")
        batch = batch.join(greedy.repeat(self.config.group_size))
        self.improve(ctx, batch, ctx.compute(self.advantages, batch))

    def advantages(self, scores, baseline_scores, loss_mask, old_logprobs=None, ref_logprobs=None):
        penalty, figures = self.penalty(loss_mask, old_logprobs, ref_logprobs)
        rewards = F.token_rewards(scores, penalty, loss_mask, beta=1.0)
        returns = F.discounted_returns(rewards, loss_mask, gamma=1.0)
        return {
            "advantages": (returns - baseline_scores[:, None]) * loss_mask,
            "baseline": baseline_scores.mean(),
            **figures,
        }
