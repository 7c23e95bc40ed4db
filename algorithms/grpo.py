"""GRPO: several responses per prompt, each judged against its group; no critic (DeepSeekMath, arXiv:2402.03300)."""

from __future__ import annotations

import attrs

from hybridflow.algorithms import functional as F
from hybridflow.algorithms.policy import PolicyConfig, PolicyLoss
from hybridflow.core.algorithm import Algorithm, Role
from hybridflow.core.config.validators import at_least, non_negative

_one_of = attrs.validators.in_


@attrs.frozen
class GRPOConfig(PolicyConfig):
    """Group-relative policy optimisation."""

    prompts_per_step: int = attrs.field(default=64, validator=at_least(1))
    """Prompts drawn per step."""
    group_size: int = attrs.field(default=8, validator=at_least(2))
    """Responses per prompt, G in the paper."""
    scale: str = attrs.field(default="std", validator=_one_of(("std", "none")))
    """Divide a group's centred scores by their standard deviation, or not."""
    how: str = attrs.field(default="seq-mean-token-mean", validator=_one_of(("seq-mean-token-mean", "token-mean")))
    """Mean over each response, then over responses (the paper's), or over all tokens."""
    kl_coef: float = attrs.field(default=0.0, validator=non_negative)
    """beta: weight of the KL to the reference in the loss; 0 needs no reference."""
    kl_kind: str = attrs.field(default="k3", validator=_one_of(("k2", "k3")))
    """The estimator of that KL."""


class GRPO(Algorithm):
    """Advantage of every token: the response's score, normalised within its group."""

    Config = GRPOConfig

    def roles(self) -> tuple[Role, ...]:
        ref = (Role("ref"),) if self.config.kl_coef else ()
        return (Role("actor", trained=True, generates=True), *ref, Role("reward", "reward"))

    def problems(self) -> list[str]:
        c = self.config
        if c.mini_batch_size > self.rows_per_step:
            return [f"mini_batch_size {c.mini_batch_size} is larger than the {self.rows_per_step} sequences of a step"]
        return []

    @property
    def rows_per_step(self) -> int:
        return self.config.prompts_per_step * self.config.group_size

    def updates_per_step(self) -> int:
        size = self.config.mini_batch_size or self.rows_per_step
        return -(-self.rows_per_step // size) * self.config.epochs

    def step(self, ctx) -> None:
        c = self.config
        batch = ctx.actor.generate(ctx.prompts(c.prompts_per_step).repeat(c.group_size))
        batch = batch.join(ctx.reward.score(batch))
        if c.kl_coef:
            batch = batch.join(ctx.ref.logprobs(batch))
        if not self.on_policy:
            batch = batch.join(ctx.actor.logprobs(batch))
        batch = batch.join(ctx.compute(self.advantages, batch))
        loss = self.losses()["actor"]
        for mini in ctx.minibatches(batch, c.mini_batch_size or batch.rows, c.epochs):
            ctx.actor.update((mini, loss))

    def advantages(self, scores, group, loss_mask):
        normalized = F.group_normalized(scores, group, self.config.scale)
        return {"advantages": normalized[:, None] * loss_mask}

    @property
    def on_policy(self) -> bool:
        return self.updates_per_step() == 1

    def losses(self):
        c = self.config
        return {"actor": PolicyLoss(c, c.how, self.on_policy, c.kl_coef, c.kl_kind)}
