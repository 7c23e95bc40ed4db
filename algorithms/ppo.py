"""PPO for language models: a critic, GAE, and a KL penalty in the reward (arXiv:1707.06347, 1909.08593, 2203.02155)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import attrs
import torch

from hybridflow.algorithms import functional as F
from hybridflow.algorithms.policy import RewardKLConfig
from hybridflow.algorithms.policy_gradient import PolicyGradient
from hybridflow.core.contracts.loss import Loss, Term
from hybridflow.core.contracts.role import Role
from hybridflow.core.contracts.step import StepContext
from hybridflow.core.validators import at_least, fraction, positive


@attrs.frozen
class PPOConfig(RewardKLConfig):
    """Proximal policy optimisation with a critic."""

    prompts_per_step: int = attrs.field(default=512, validator=at_least(1))
    """Prompts drawn per step."""
    gamma: float = attrs.field(default=1.0, validator=fraction)
    """Discount per token."""
    lam: float = attrs.field(default=0.95, validator=fraction)
    """lambda of GAE (arXiv:1506.02438)."""
    value_clip: float | None = attrs.field(default=0.2, validator=positive)
    """New values stay within this distance of the old ones; none: no clipping."""


class ValueLoss(Loss):
    """Clipped squared error to the returns, mean over tokens. Column `values` holds the values before the update."""

    needs = ("values",)

    def __init__(self, clip: float | None, values: str = "values", returns: str = "returns"):
        self.clip, self.values, self.returns = clip, values, returns
        self.reads = (values, returns)

    def __call__(self, batch: Mapping[str, Any], outputs: Mapping[str, torch.Tensor]) -> list[Term]:
        value = F.value_loss(outputs["values"], batch[self.values], batch[self.returns], self.clip)
        return [Term("value_loss", value), Term("value", outputs["values"].detach(), weight=0.0)]


class PPO(PolicyGradient):
    """GAE on rewards -beta kl, with the score at the last token; whitened advantages; epochs of mini-batches."""

    Config: ClassVar[type] = PPOConfig

    def roles(self) -> tuple[Role, ...]:
        return (*super().roles(), Role("critic", "value", trained=True))

    def losses(self) -> dict[str, Loss]:
        return {**super().losses(), "critic": ValueLoss(self.config.value_clip)}

    def step(self, ctx: StepContext) -> None:
        c, losses = self.config, self.losses()
        batch = ctx.actor.generate(ctx.prompts(c.prompts_per_step).repeat(c.group_size))
        batch = batch.join(
            ctx.reward.score(batch), *self.logprobs(ctx, batch), ctx.critic.values(batch)
        )
        advantages = ctx.compute(self.advantages, batch)
        for mini in self.minibatches(ctx, batch.join(advantages)):
            ctx.actor.update([(mini, losses["actor"]), *self.pretraining(ctx)])
            ctx.critic.update((mini, losses["critic"]))
        self.kl.follow(advantages, batch.rows)

    def advantages(
        self, scores, values, loss_mask, old_logprobs=None, ref_logprobs=None, token_scores=None
    ):
        penalty, figures = self.kl.penalty(loss_mask, old_logprobs, ref_logprobs)
        rewards = F.token_rewards(
            scores if token_scores is None else token_scores, penalty, loss_mask, beta=1.0
        )
        advantages, returns = F.gae(rewards, values, loss_mask, self.config.gamma, self.config.lam)
        return {"advantages": F.whiten(advantages, loss_mask), "returns": returns, **figures}
