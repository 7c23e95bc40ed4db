"""The steps that the policy-gradient algorithms share: sampling, the KL to a reference, updates over mini-batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from hybridflow.algorithms import functional as F
from hybridflow.algorithms.policy import PolicyConfig, PolicyLoss
from hybridflow.algorithms.sft import NextTokenLoss
from hybridflow.core.contracts.algorithm import Algorithm
from hybridflow.core.contracts.loss import Loss
from hybridflow.core.contracts.role import Role
from hybridflow.core.values.batch import Batch


class PolicyGradient(Algorithm):
    """Responses, their scores, advantages, then mini-batches. A subclass has `advantages`, whose parameters are columns; or a
    step of its own, of the same parts."""

    Config: ClassVar[type] = PolicyConfig
    loss: type[PolicyLoss] = PolicyLoss
    """The actor's loss."""
    advantages: Callable[..., dict[str, Any]]
    """Its parameters are columns, see `ctx.compute`."""

    def __init__(self, config: Any):
        super().__init__(config)
        c = config
        self.adaptive = F.AdaptiveKL(c.kl_coef, c.kl_target, c.kl_horizon) if c.kl_coef and c.kl_target else None

    def roles(self) -> tuple[Role, ...]:
        ref = (Role("ref"),) if self.config.kl_coef else ()
        return (Role("actor", trained=True, generates=True), *ref, Role("reward", "reward"))

    def problems(self) -> list[str]:
        c, found = self.config, []
        if c.mini_batch_size > self.rows_per_step:
            found.append(
                f"mini_batch_size {c.mini_batch_size} is larger than the {self.rows_per_step} sequences of a step"
            )
        if c.dual_clip is not None and c.dual_clip <= 1:
            found.append(f"dual_clip must be above 1, got {c.dual_clip}")
        if c.kl_target and self.rows_per_step >= 5 * c.kl_horizon:
            found.append(
                f"kl_horizon {c.kl_horizon:g} is too small for the {self.rows_per_step} sequences of a step: one could make "
                "beta negative; set it above a fifth of them"
            )
        if c.kl_target and not c.kl_coef:
            found.append("kl_target needs kl_coef > 0, the coefficient to begin with")
        if c.kl_coef and c.kl_in == "loss" and c.kl_kind == "k1":
            found.append('kl_kind "k1" has no gradient on policy as a loss: use "k2" or "k3", or kl_in = "reward"')
        if c.how == "seq-mean-token-sum-norm" and not c.length:
            found.append('how = "seq-mean-token-sum-norm" needs length, the constant it divides by')
        return found

    @property
    def data_sets(self) -> dict[str, tuple[str, ...]]:
        return {"pretrain": ("response_ids",)} if self.config.pretrain_coef else {}

    @property
    def rows_per_step(self) -> int:
        return self.config.prompts_per_step * self.config.group_size

    def updates_per_step(self) -> int:
        size = self.config.mini_batch_size or self.rows_per_step
        return -(-self.rows_per_step // size) * self.config.epochs

    @property
    def on_policy(self) -> bool:
        return self.updates_per_step() == 1

    @property
    def beta(self) -> float:
        """The coefficient of the KL at this step."""
        return self.adaptive.value if self.adaptive else self.config.kl_coef

    def step(self, ctx) -> None:
        batch = self.sample(ctx, ctx.prompts(self.config.prompts_per_step))
        self.improve(ctx, batch, ctx.compute(self.advantages, batch))

    def sample(self, ctx, prompts: Batch) -> Batch:
        """group_size responses per prompt with scores, and the logprobs that the KL and the loss need."""
        c = self.config
        batch = ctx.actor.generate(prompts.repeat(c.group_size))
        made = [ctx.reward.score(batch)]
        if c.kl_coef:
            made.append(ctx.ref.logprobs(batch))
        if not self.on_policy or (c.kl_coef and (c.kl_in == "reward" or self.adaptive)):
            made.append(ctx.actor.logprobs(batch))
        return batch.join(*made)

    def penalty(self, loss_mask, old_logprobs=None, ref_logprobs=None) -> tuple[torch.Tensor, dict[str, Any]]:
        """beta times the KL of each token that its reward pays, [B, T], and figures; 0 where the loss has the KL."""
        if ref_logprobs is None or old_logprobs is None:
            return torch.zeros(loss_mask.shape), {}
        kl = F.kl_estimate(old_logprobs, ref_logprobs, self.config.kl_kind)
        figures = {"kl": F.masked_mean(kl, loss_mask), "beta": self.beta}
        paid = self.beta if self.config.kl_in == "reward" else 0.0
        return paid * kl.masked_fill(loss_mask == 0, 0.0), figures

    def improve(self, ctx, batch: Batch, advantages: Batch) -> None:
        """Updates of every trained role over the mini-batches; then beta."""
        c, batch, losses = self.config, batch.join(advantages), self.losses()
        for mini in ctx.minibatches(batch, c.mini_batch_size or batch.rows, c.epochs):
            for role, loss in losses.items():
                text = [self.pretraining(ctx)] if role == "actor" and c.pretrain_coef else []
                getattr(ctx, role).update([(mini, loss), *text])
        if self.adaptive:
            self.adaptive.update(advantages.metrics["kl"], batch.rows)

    def pretraining(self, ctx) -> tuple[Batch, Loss]:
        """Rows of [pretrain] and their loss, for the optimizer step of a mini-batch."""
        return ctx.prompts(self.config.pretrain_batch_size, "pretrain"), NextTokenLoss(self.config.pretrain_coef)

    def losses(self) -> dict[str, Loss]:
        in_loss = self.beta if self.config.kl_in == "loss" else 0.0
        return {"actor": self.loss(self.config, self.on_policy, in_loss)}

    def state_dict(self) -> dict[str, Any]:
        return {"adaptive": self.adaptive.state_dict()} if self.adaptive else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.adaptive:
            self.adaptive.load_state_dict(state["adaptive"])
