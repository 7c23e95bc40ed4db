"""PPO for language models: a critic, GAE, and a KL penalty in the reward.

The sources are arXiv:1707.06347, arXiv:1909.08593 and arXiv:2203.02155.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import attrs
import torch

from hybridflow.algorithms import functional as F
from hybridflow.algorithms.policy import ClippedConfig, CorrectionConfig
from hybridflow.algorithms.policy_gradient import PolicyGradient, PretrainConfig
from hybridflow.algorithms.reference_kl import RewardKLConfig
from hybridflow.core.contracts.loss import Loss, Term
from hybridflow.core.contracts.role import Role
from hybridflow.core.contracts.step import StepContext
from hybridflow.core.validators import at_least, fraction, positive


@attrs.frozen
class PPOConfig(ClippedConfig, CorrectionConfig, RewardKLConfig, PretrainConfig):
    """Settings of proximal policy optimisation with a critic."""

    prompts_per_step: int = attrs.field(default=512, validator=at_least(1))
    """Prompts drawn per step."""
    gamma: float = attrs.field(default=1.0, validator=fraction)
    """Discount per token."""
    lam: float = attrs.field(default=0.95, validator=fraction)
    """lambda of GAE (arXiv:1506.02438)."""
    value_clip: float | None = attrs.field(default=0.2, validator=positive)
    """Distance from the old value at which a new one is clipped; none: no clipping."""


class ValueLoss(Loss):
    """The clipped squared error of values to returns, as a mean over tokens (arXiv:2005.12729).

    The batch's column `values` holds the values before the update.
    """

    needs = ("values",)

    def __init__(self, clip: float | None, values: str = "values", returns: str = "returns"):
        self.clip = clip
        self.values = values
        self.returns = returns
        self.reads = (values, returns)

    def __call__(self, batch: Mapping[str, Any], outputs: Mapping[str, torch.Tensor]) -> list[Term]:
        # The second term is a metric: the mean value.
        values = outputs["values"]
        loss = F.value_loss(values, batch[self.values], batch[self.returns], self.clip)
        return [Term("value_loss", loss), Term("value", values.detach(), weight=0.0)]


class PPO(PolicyGradient):
    """PPO's step: epochs of mini-batches that update actor and critic (arXiv:1707.06347)."""

    Config: ClassVar[type] = PPOConfig

    def roles(self) -> tuple[Role, ...]:
        return (*super().roles(), Role("critic", "value", trained=True))

    def losses(self) -> dict[str, Loss]:
        return {**super().losses(), "critic": ValueLoss(self.config.value_clip)}

    def step(self, ctx: StepContext) -> None:
        """Generate, score and value responses, then update actor and critic on mini-batches."""
        config = self.config
        losses = self.losses()

        # Generation and inference.
        prompts = ctx.prompts(config.prompts_per_step)
        batch = ctx.actor.generate(prompts.repeat(config.group_size))
        inferred = [ctx.reward.score(batch), ctx.critic.values(batch)]
        if config.kl_coef:
            inferred.append(ctx.ref.logprobs(batch))
        if self.reads_old_logprobs:
            inferred.append(ctx.actor.logprobs(batch))
        batch = batch.join(*inferred)
        advantages = ctx.compute(self.advantages, batch)

        # Training.
        for mini in self.minibatches(ctx, batch.join(advantages)):
            ctx.actor.update([(mini, losses["actor"]), *self.pretraining(ctx)])
            ctx.critic.update((mini, losses["critic"]))

        # An adaptive KL coefficient moves once a step.
        self.kl.follow(advantages, batch.rows)

    def advantages(
        self, scores, values, loss_mask, old_logprobs=None, ref_logprobs=None, token_scores=None
    ):
        """Compute advantages, whitened, and returns by GAE on rewards score - beta kl.

        The score counts at a response's last token; `token_scores` [B, T], where there are any,
        are used instead of `scores` [B].
        """
        # Only the advantages are whitened: returns are the targets of the critic.
        penalty, figures = self.kl.penalty(loss_mask, old_logprobs, ref_logprobs)
        scores = scores if token_scores is None else token_scores
        rewards = F.token_rewards(scores, penalty, loss_mask, beta=1.0)
        advantages, returns = F.gae(rewards, values, loss_mask, self.config.gamma, self.config.lam)
        return {"advantages": F.whiten(advantages, loss_mask), "returns": returns, **figures}
