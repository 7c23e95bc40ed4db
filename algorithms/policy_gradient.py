"""What the policy-gradient algorithms share beside their steps: roles, sizes, losses, state, and the verbs that steps name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from hybridflow.algorithms.policy import PolicyConfig, PolicyLoss
from hybridflow.algorithms.reference_kl import ReferenceKL
from hybridflow.algorithms.sft import NextTokenLoss
from hybridflow.core.contracts.algorithm import Algorithm
from hybridflow.core.contracts.loss import Loss
from hybridflow.core.contracts.role import Role
from hybridflow.core.contracts.step import Pair, StepContext
from hybridflow.core.values.batch import Batch


class PolicyGradient(Algorithm):
    """A subclass has the step; it samples, scores, computes advantages and updates over mini-batches."""

    Config: ClassVar[type] = PolicyConfig
    loss: type[PolicyLoss] = PolicyLoss
    """The actor's loss."""

    def __init__(self, config: Any):
        super().__init__(config)
        self.kl = ReferenceKL(config)

    def roles(self) -> tuple[Role, ...]:
        return (
            Role("actor", trained=True, generates=True),
            *self.kl.roles(),
            Role("reward", "reward"),
        )

    def losses(self) -> dict[str, Loss]:
        return {"actor": self.loss(self.config, self.on_policy, self.kl.in_loss)}

    # Verbs of steps
    def logprobs(self, ctx: StepContext, batch: Batch) -> list[Batch]:
        """The reference's, and the policy's own before the update, as far as the KL and the ratio need them."""
        found = self.kl.logprobs(ctx, batch)
        if not self.on_policy or self.kl.reads_old_logprobs:
            found.append(ctx.actor.logprobs(batch))
        return found

    def minibatches(self, ctx: StepContext, batch: Batch) -> Iterator[Batch]:
        """`epochs` passes over the batch, `mini_batch_size` sequences for each optimizer step."""
        return ctx.minibatches(batch, self.config.mini_batch_size or batch.rows, self.config.epochs)

    def pretraining(self, ctx: StepContext) -> list[Pair]:
        """Rows of [pretrain] with their loss, beside a mini-batch (PPO-ptx, arXiv:2203.02155); none without pretrain_coef."""
        c = self.config
        if not c.pretrain_coef:
            return []
        return [(ctx.prompts(c.pretrain_batch_size, "pretrain"), NextTokenLoss(c.pretrain_coef))]

    # Sizes, and what is wrong with them
    def problems(self) -> list[str]:
        c, rows, problems = self.config, self.rows_per_step, []
        if c.mini_batch_size > rows:
            problems.append(
                f"mini_batch_size {c.mini_batch_size} is larger than the {rows} sequences of a step"
            )
        if c.dual_clip is not None and c.dual_clip <= 1:
            problems.append(f"dual_clip must be above 1, got {c.dual_clip}")
        problems += self.kl.problems(rows)
        if c.how == "seq-mean-token-sum-norm" and not c.length:
            problems.append(
                'how = "seq-mean-token-sum-norm" needs length, the constant it divides by'
            )
        return problems

    @property
    def data_sets(self) -> dict[str, tuple[str, ...]]:
        return {"pretrain": ("response_ids",)} if self.config.pretrain_coef else {}

    @property
    def rows_per_step(self) -> int:
        return self.config.prompts_per_step * self.config.group_size

    @property
    def rows_per_update(self) -> int:
        return min(self.config.mini_batch_size or self.rows_per_step, self.rows_per_step)

    def updates_per_step(self) -> int:
        return (
            -(-self.rows_per_step // (self.config.mini_batch_size or self.rows_per_step))
            * self.config.epochs
        )

    @property
    def on_policy(self) -> bool:
        return self.updates_per_step() == 1

    # State
    def state_dict(self) -> dict[str, Any]:
        return self.kl.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kl.load_state_dict(state)
