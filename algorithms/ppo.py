"""PPO for language models: a critic, GAE, and a KL penalty in the reward (arXiv:1707.06347, 1909.08593, 2203.02155)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch

from hybridflow.algorithms import functional as F
from hybridflow.algorithms.policy import PolicyConfig, PolicyLoss
from hybridflow.core.algorithm import Algorithm, Role
from hybridflow.core.config.validators import at_least, fraction, non_negative, positive
from hybridflow.core.loss import Loss, Term


@attrs.frozen
class PPOConfig(PolicyConfig):
    """Proximal policy optimisation with a critic."""

    prompts_per_step: int = attrs.field(default=512, validator=at_least(1))
    """Prompts, and so sequences, per step."""
    gamma: float = attrs.field(default=1.0, validator=fraction)
    """Discount per token."""
    lam: float = attrs.field(default=0.95, validator=fraction)
    """lambda of GAE (arXiv:1506.02438)."""
    kl_coef: float = attrs.field(default=0.05, validator=non_negative)
    """beta: weight of the per-token KL penalty in the reward; 0 needs no reference."""
    kl_kind: str = attrs.field(default="k1", validator=attrs.validators.in_(("k1", "abs", "k2", "k3")))
    """The estimator of that KL."""
    kl_target: float | None = attrs.field(default=None, validator=positive)
    """Adaptive coefficient: beta follows this KL per token (arXiv:1909.08593, section 2.2); none: fixed."""
    kl_horizon: float = attrs.field(default=10_000.0, validator=positive)
    """Sequences over which the adaptive beta moves."""
    value_clip: float | None = attrs.field(default=0.2, validator=positive)
    """New values stay within this distance of the old ones; none: no clipping."""


class ValueLoss(Loss):
    """Clipped squared error to the returns, mean over tokens. Column `values` holds the values before the update."""

    reads, needs = ("values", "returns"), ("values",)

    def __init__(self, clip: float | None):
        self.clip = clip

    def __call__(self, batch: Mapping[str, Any], outputs: Mapping[str, torch.Tensor]) -> list[Term]:
        value = F.value_loss(outputs["values"], batch["values"], batch["returns"], self.clip)
        return [Term("value_loss", value), Term("value", outputs["values"].detach(), weight=0.0)]


class PPO(Algorithm):
    """GAE on rewards -beta kl, with the score at the last token; whitened advantages; epochs of mini-batches."""

    Config = PPOConfig

    def __init__(self, config: PPOConfig):
        super().__init__(config)
        self.adaptive = None
        if config.kl_coef and config.kl_target:
            self.adaptive = F.AdaptiveKL(config.kl_coef, config.kl_target, config.kl_horizon)

    def roles(self) -> tuple[Role, ...]:
        ref = (Role("ref"),) if self.config.kl_coef else ()
        critic = Role("critic", "value", trained=True)
        return (Role("actor", trained=True, generates=True), critic, *ref, Role("reward", "reward"))

    def problems(self) -> list[str]:
        c, found = self.config, []
        if c.mini_batch_size > c.prompts_per_step:
            found.append(f"mini_batch_size {c.mini_batch_size} is larger than prompts_per_step {c.prompts_per_step}")
        if c.kl_target and not c.kl_coef:
            found.append("kl_target needs kl_coef > 0, the coefficient to begin with")
        return found

    @property
    def rows_per_step(self) -> int:
        return self.config.prompts_per_step

    def updates_per_step(self) -> int:
        size = self.config.mini_batch_size or self.config.prompts_per_step
        return -(-self.config.prompts_per_step // size) * self.config.epochs

    def step(self, ctx) -> None:
        c = self.config
        batch = ctx.actor.generate(ctx.prompts(c.prompts_per_step))
        batch = batch.join(ctx.reward.score(batch), ctx.critic.values(batch), ctx.actor.logprobs(batch))
        if c.kl_coef:
            batch = batch.join(ctx.ref.logprobs(batch))
        batch = batch.join(computed := ctx.compute(self.advantages, batch))
        losses = self.losses()
        for mini in ctx.minibatches(batch, c.mini_batch_size or batch.rows, c.epochs):
            ctx.actor.update((mini, losses["actor"]))
            ctx.critic.update((mini, losses["critic"]))
        if self.adaptive:
            self.adaptive.update(computed.metrics["kl"], batch.rows)

    def advantages(self, scores, old_logprobs, values, loss_mask, ref_logprobs=None):
        c, reference = self.config, old_logprobs if ref_logprobs is None else ref_logprobs
        kl = F.kl_estimate(old_logprobs, reference, c.kl_kind)
        rewards = F.token_rewards(scores, kl, loss_mask, self.beta)
        advantages, returns = F.gae(rewards, values, loss_mask, c.gamma, c.lam)
        figures = {"kl": F.masked_mean(kl, loss_mask), "beta": self.beta}
        return {"advantages": F.whiten(advantages, loss_mask), "returns": returns, **figures}

    @property
    def beta(self) -> float:
        return self.adaptive.value if self.adaptive else self.config.kl_coef

    def losses(self):
        return {"actor": PolicyLoss(self.config, "token-mean"), "critic": ValueLoss(self.config.value_clip)}

    def state_dict(self) -> dict[str, Any]:
        return {"adaptive": self.adaptive.state_dict()} if self.adaptive else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.adaptive:
            self.adaptive.load_state_dict(state["adaptive"])
