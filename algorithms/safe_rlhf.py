"""Safe RLHF: the reward rises while the expected cost stays under a limit.

A Lagrange multiplier lambda weighs the cost. The source is arXiv:2310.12773.
"""

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
    """Settings of PPO-Lagrangian with a reward and a cost, each with its critic."""

    cost_limit: float = 0.0
    """d: the highest acceptable mean cost of a response."""
    multiplier: float = attrs.field(default=1.0, validator=positive)
    """The first lambda."""
    multiplier_lr: float = attrs.field(default=0.04, validator=positive)
    """Step size of log lambda."""
    multiplier_max: float = attrs.field(default=10.0, validator=positive)
    """Upper bound of lambda."""
    multiplier_window: int = attrs.field(default=1024, validator=at_least(1))
    """Number of the latest responses over which the mean cost is taken."""
    multiplier_damping: float = attrs.field(default=0.0, validator=non_negative)
    """Factor k of exp(k (mean cost - limit)), by which lambda is also multiplied to damp its swings
    (arXiv:2007.03964)."""


class SafeRLHF(PPO):
    """PPO's step with a second critic, for costs, and the multiplier lambda."""

    Config = SafeRLHFConfig

    def __init__(self, config: SafeRLHFConfig):
        super().__init__(config)
        self.multiplier = F.LagrangeMultiplier(
            config.multiplier,
            config.multiplier_lr,
            config.cost_limit,
            config.multiplier_max,
            config.multiplier_window,
            config.multiplier_damping,
        )

    def roles(self) -> tuple[Role, ...]:
        return (
            *super().roles(),
            Role("cost_critic", "value", trained=True),
            Role("cost", "reward"),
        )

    def step(self, ctx: StepContext) -> None:
        """Take PPO's step with costs and their values as well, and move lambda by the costs."""
        config = self.config
        losses = self.losses()

        # Generation and inference.
        prompts = ctx.prompts(config.prompts_per_step)
        batch = ctx.actor.generate(prompts.repeat(config.group_size))
        inferred = [
            ctx.reward.score(batch),
            ctx.cost.score(batch),
            ctx.critic.values(batch),
            ctx.cost_critic.values(batch),
        ]
        if config.kl_coef:
            inferred.append(ctx.ref.logprobs(batch))
        if self.reads_old_logprobs:
            inferred.append(ctx.actor.logprobs(batch))
        batch = batch.join(*inferred)

        # Lambda moves first, so that the advantages are weighted by this step's costs: the
        # controller waits for them here.
        costs = torch.as_tensor(batch["costs"].values)
        self.multiplier.update(costs[~costs.isnan()])
        advantages = ctx.compute(self.lagrangian_advantages, batch)

        # Training.
        for mini in self.minibatches(ctx, batch.join(advantages)):
            ctx.actor.update([(mini, losses["actor"]), *self.pretraining(ctx)])
            ctx.critic.update((mini, losses["critic"]))
            ctx.cost_critic.update((mini, losses["cost_critic"]))

        # An adaptive KL coefficient moves once a step.
        self.kl.follow(advantages, batch.rows)

    def lagrangian_advantages(
        self,
        scores,
        costs,
        values,
        cost_values,
        loss_mask,
        old_logprobs=None,
        ref_logprobs=None,
        token_scores=None,
        token_costs=None,
    ):
        """Compute A = (A_reward - lambda A_cost) / (1 + lambda), and the returns of both critics.

        beta kl is subtracted from rewards and added to costs, so that its weight in A stays beta.
        `token_scores` and `token_costs` [B, T], where there are any, are used instead of `scores`
        and `costs` [B].
        """
        # The reward and the cost of each token, both with the KL.
        config = self.config
        lam = self.multiplier.value
        loss_mask = F.without_failed(loss_mask, scores, costs)
        penalty, figures = self.kl.penalty(loss_mask, old_logprobs, ref_logprobs)
        scores = scores if token_scores is None else token_scores
        costs = costs if token_costs is None else token_costs
        rewards = F.token_rewards(scores, penalty, loss_mask, 1.0)
        charges = F.token_rewards(costs, penalty, loss_mask, -1.0)

        # Each critic's values go with its own rewards. Dividing by 1 + lambda keeps A's size.
        reward_advantages, returns = F.gae(rewards, values, loss_mask, config.gamma, config.lam)
        cost_advantages, cost_returns = F.gae(
            charges, cost_values, loss_mask, config.gamma, config.lam
        )
        advantages = (reward_advantages - lam * cost_advantages) / (1 + lam)
        return {
            "advantages": advantages,
            "loss_mask": loss_mask,
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
