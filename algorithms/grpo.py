"""GRPO: each response is judged against the others of its prompt, without a critic.

The source is DeepSeekMath (arXiv:2402.03300).
"""

from __future__ import annotations

from typing import ClassVar

import attrs

from hybridflow.algorithms import functional as F
from hybridflow.algorithms.policy import (
    AGGREGATIONS,
    ClippedConfig,
    CorrectionConfig,
    PolicyConfig,
    one_of,
)
from hybridflow.algorithms.policy_gradient import PolicyGradient, PretrainConfig
from hybridflow.algorithms.reference_kl import KLConfig
from hybridflow.core.contracts.step import StepContext
from hybridflow.core.validators import at_least


@attrs.frozen(slots=False)
class GroupConfig(PolicyConfig, CorrectionConfig, KLConfig, PretrainConfig):
    """Settings of advantages that compare the scores of a prompt's group of responses."""

    group_size: int = attrs.field(default=8, validator=at_least(2))
    """Responses per prompt, G in the paper."""
    scale: str = attrs.field(default="std", validator=one_of(("std", "none")))
    """Whether a group's centred scores are divided by their standard deviation (std, none)."""


@attrs.frozen(slots=False)
class GRPOConfig(GroupConfig, ClippedConfig):
    """Settings of group-relative policy optimisation."""

    how: str = attrs.field(default="seq-mean-token-mean", validator=AGGREGATIONS)
    """How the loss is averaged; the paper's is the mean over each response, then over responses."""


class GRPO(PolicyGradient):
    """GRPO's step (arXiv:2402.03300, section 4.1)."""

    Config: ClassVar[type] = GRPOConfig

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
        """Return for every token the score [B] of its response, normalised within its group."""
        penalty, figures = self.kl.penalty(loss_mask, old_logprobs, ref_logprobs)
        normalized = F.group_normalized(scores - penalty.sum(1), group, self.config.scale)
        return {"advantages": normalized[:, None] * loss_mask, **figures}
