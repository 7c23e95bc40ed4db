"""Safe RLHF: the reward rises while the expected cost stays under a limit, by a Lagrange multiplier (arXiv:2310.12773)."""

from __future__ import annotations

from typing import Any

import attrs
import torch

from hybridflow.algorithms import functional as F
from hybridflow.algorithms.ppo import PPO, PPOConfig, ValueLoss
from hybridflow.core.contracts.role import Role
from hybridflow.core.contracts.step import StepContext
from hybridflow.core.validators import at_least, non_negative, positive


@attrs.frozen
class SafeRLHFConfig(PPOConfig):
    """PPO-Lagrangian with a reward and a cost, each with its critic."""

    cost_limit: float = 0.0
    """d: the highest acceptable mean cost of a response."""
    multiplier: float = attrs.field(default=1.0, validator=positive)
    """lambda to begin with."""
    multiplier_lr: float = attrs.field(default=0.04, validator=positive)
    """Its step size, in log lambda."""
    multiplier_max: float = attrs.field(default=10.0, validator=positive)
    multiplier_window: int = attrs.field(default=1024, validator=at_least(1))
    """The mean cost is taken over so many of the latest responses."""
    multiplier_damping: float = attrs.field(default=0.0, validator=non_negative)
    """lambda is also multiplied by exp of this times the mean cost's excess, which damps its swings (arXiv:2007.03964)."""


class SafeRLHF(PPO):
    """Advantage (A_reward - lambda A_cost) / (1 + lambda). Rewards pay beta kl, and costs earn it: its weight stays beta."""

    Config = SafeRLHFConfig

    def __init__(self, config: SafeRLHFConfig):
        super().__init__(config)
        c = config
        self.multiplier = F.LagrangeMultiplier(
            c.multiplier,
            c.multiplier_lr,
            c.cost_limit,
            c.multiplier_max,
            c.multiplier_window,
            c.multiplier_damping,
        )

    def roles(self) -> tuple[Role, ...]:
        return (
            *super().roles(),
            Role("cost_critic", "value", trained=True),
            Role("cost", "reward"),
        )

    def step(self, ctx: StepContext) -> None:
        c, losses = self.config, self.losses()
        batch = ctx.actor.generate(ctx.prompts(c.prompts_per_step).repeat(c.group_size))
        batch = batch.join(ctx.reward.score(batch), *self.logprobs(ctx, batch))
        batch = batch.join(
            ctx.cost.score(batch), ctx.critic.values(batch), ctx.cost_critic.values(batch)
        )
        self.multiplier.update(torch.as_tensor(batch["costs"].values))
        advantages = ctx.compute(self.lagrangian_advantages, batch)
        for mini in self.minibatches(ctx, batch.join(advantages)):
            ctx.actor.update([(mini, losses["actor"]), *self.pretraining(ctx)])
            ctx.critic.update((mini, losses["critic"]))
            ctx.cost_critic.update((mini, losses["cost_critic"]))
        self.kl.follow(advantages, batch.rows)

    def lagrangian_advantages(
        self, scores, costs, values, cost_values, loss_mask, old_logprobs=None, ref_logprobs=None, token_scores=None,
        token_costs=None,
    ):  # fmt: skip
        c, lam, mask = self.config, self.multiplier.value, loss_mask
        penalty, figures = self.kl.penalty(mask, old_logprobs, ref_logprobs)
        rewards = F.token_rewards(
            scores if token_scores is None else token_scores, penalty, mask, 1.0
        )
        charges = F.token_rewards(
            costs if token_costs is None else token_costs, penalty, mask, -1.0
        )
        reward_advantages, returns = F.gae(rewards, values, mask, c.gamma, c.lam)
        cost_advantages, cost_returns = F.gae(charges, cost_values, mask, c.gamma, c.lam)
        advantages = (reward_advantages - lam * cost_advantages) / (1 + lam)
        return {
            "advantages": advantages,
            "returns": returns,
            "cost_returns": cost_returns,
            "lambda": lam,
            **figures,
        }

    def losses(self):
        cost = ValueLoss(self.config.value_clip, "cost_values", "cost_returns")
        return {**super().losses(), "cost_critic": cost}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "multiplier": self.multiplier.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.multiplier.load_state_dict(state["multiplier"])
