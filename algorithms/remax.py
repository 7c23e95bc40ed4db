"""ReMax: REINFORCE with the score of the greedy response as its baseline, without a critic.

The source is arXiv:2310.10505.
"""

from __future__ import annotations

import attrs

from hybridflow.algorithms import functional as F
from hybridflow.algorithms.policy import AGGREGATIONS, ClippedConfig, CorrectionConfig
from hybridflow.algorithms.policy_gradient import PolicyGradient, PretrainConfig
from hybridflow.algorithms.reference_kl import RewardKLConfig
from hybridflow.core.contracts.step import StepContext


@attrs.frozen
class ReMaxConfig(ClippedConfig, CorrectionConfig, RewardKLConfig, PretrainConfig):
    """Settings of ReMax."""

    how: str = attrs.field(default="seq-mean-token-sum", validator=AGGREGATIONS)
    """How the loss is averaged; the paper sums over the tokens of each response."""


class ReMax(PolicyGradient):
    """ReMax's step, with a greedy response to every prompt as well (arXiv:2310.10505)."""

    Config = ReMaxConfig

    def step(self, ctx: StepContext) -> None:
        """Generate sampled and greedy responses, score both, then update the actor."""
        config = self.config
        losses = self.losses()

        # Generation and inference of the sampled responses.
        prompts = ctx.prompts(config.prompts_per_step)
        batch = ctx.actor.generate(prompts.repeat(config.group_size))
        inferred = [ctx.reward.score(batch)]
        if config.kl_coef:
            inferred.append(ctx.ref.logprobs(batch))
        if self.reads_old_logprobs:
            inferred.append(ctx.actor.logprobs(batch))
        batch = batch.join(*inferred)

        # The baseline: one greedy response per prompt, which stays out of the step's metrics.
        with ctx.aside():
            greedy = ctx.actor.generate(prompts, greedy=True)
            baseline = ctx.reward.score(greedy).rename(scores="baseline_scores")
        batch = batch.join(baseline.repeat(config.group_size))
        advantages = ctx.compute(self.advantages, batch)

        for mini in self.minibatches(ctx, batch.join(advantages)):
            ctx.actor.update([(mini, losses["actor"]), *self.pretraining(ctx)])

        # An adaptive KL coefficient moves once a step.
        self.kl.follow(advantages, batch.rows)

    def advantages(self, scores, baseline_scores, loss_mask, old_logprobs=None, ref_logprobs=None):
        """Return for every token the sum of rewards from it on, less the greedy score.

        Responses whose greedy one has failed have no baseline, and are left out.
        """
        loss_mask = F.without_failed(loss_mask, scores, baseline_scores)
        penalty, figures = self.kl.penalty(loss_mask, old_logprobs, ref_logprobs)
        rewards = F.token_rewards(scores, penalty, loss_mask, beta=1.0)
        returns = F.discounted_returns(rewards, loss_mask, gamma=1.0)
        advantages = (returns - baseline_scores[:, None]).masked_fill(loss_mask == 0, 0)
        baseline = F.masked_mean(baseline_scores, ~baseline_scores.isnan())
        return {
            "advantages": advantages,
            "loss_mask": loss_mask,
            "baseline": baseline,
            **figures,
        }
