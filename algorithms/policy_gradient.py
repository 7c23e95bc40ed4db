"""The base of the policy-gradient algorithms: roles, losses, sizes, state, and verbs of a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import attrs

from hybridflow.algorithms.policy import (
    AggregationConfig,
    CorrectionConfig,
    PolicyConfig,
    PolicyLoss,
)
from hybridflow.algorithms.reference_kl import KLConfig, ReferenceKL
from hybridflow.algorithms.sft import NextTokenLoss
from hybridflow.core.contracts.algorithm import Algorithm
from hybridflow.core.contracts.loss import Loss
from hybridflow.core.contracts.role import Role
from hybridflow.core.contracts.rollout import SamplingParams
from hybridflow.core.contracts.step import Pair, StepContext
from hybridflow.core.validators import at_least, non_negative
from hybridflow.core.values.batch import Batch


@attrs.frozen(slots=False)
class PretrainConfig:
    """Settings of pretraining text that is mixed into the actor's updates."""

    pretrain_coef: float = attrs.field(default=0.0, validator=non_negative)
    """Weight of the next-token loss on rows of [pretrain] in each of the actor's updates (PPO-ptx,
    arXiv:2203.02155); 0 needs no such rows."""
    pretrain_batch_size: int = attrs.field(default=64, validator=at_least(1))
    """Rows of [pretrain] per update."""


class PolicyGradient(Algorithm):
    """An algorithm that samples responses, scores them and updates the actor by their advantages.

    A subclass has the step, and `advantages`, a function of columns for ctx.compute. Its Config
    extends PolicyConfig by what the step uses: without a KLConfig there is no KL and no reference,
    without a PretrainConfig no [pretrain].
    """

    Config: ClassVar[type] = PolicyConfig
    loss: type[PolicyLoss] = PolicyLoss
    """The actor's loss."""

    def __init__(self, config: Any):
        super().__init__(config)
        self.kl = ReferenceKL(config if isinstance(config, KLConfig) else KLConfig())

    def roles(self) -> tuple[Role, ...]:
        """Return the actor, the reference if there is a KL, and the reward."""
        return (
            Role("actor", trained=True, generates=True),
            *self.kl.roles(),
            Role("reward", "reward"),
        )

    def losses(self) -> dict[str, Loss]:
        """Return the actor's loss, with the KL's coefficient as it is now."""
        kl = self.kl
        return {"actor": self.loss(self.config, self.on_policy, kl.in_loss, kl.config.kl_kind)}

    # --- verbs of steps ---

    def minibatches(self, ctx: StepContext, batch: Batch) -> Iterator[Batch]:
        """Yield the batch `epochs` times, `mini_batch_size` sequences per optimizer step."""
        return ctx.minibatches(batch, self.config.mini_batch_size or batch.rows, self.config.epochs)

    def pretraining(self, ctx: StepContext) -> list[Pair]:
        """Draw rows of [pretrain] and return them with their loss, to join a mini-batch.

        This is PPO-ptx (arXiv:2203.02155). The list is empty where pretrain_coef is 0.
        """
        config = self.config
        if not config.pretrain_coef:
            return []

        # New rows for each update; the coefficient is the weight of their loss.
        rows = ctx.prompts(config.pretrain_batch_size, "pretrain")
        return [(rows, NextTokenLoss(config.pretrain_coef))]

    # --- sizes, and what is wrong with them ---

    def problems(self, sampling: SamplingParams) -> list[str]:
        config = self.config
        rows = self.rows_per_step
        problems = []
        if config.mini_batch_size > rows:
            problems.append(
                f"mini_batch_size {config.mini_batch_size} is larger than "
                f"the {rows} sequences of a step"
            )
        problems += self.kl.problems(rows)
        if isinstance(config, CorrectionConfig):
            problems += self._problems_of_old(config)
        by_length = isinstance(config, AggregationConfig) and config.how.endswith("-norm")
        if by_length and not config.length:
            problems.append(f'how = "{config.how}" needs length, the constant it divides by')
        return problems

    def _problems_of_old(self, config: CorrectionConfig) -> list[str]:
        if config.old_logprobs == "rollout" and config.correction != "none":
            return [
                f'old_logprobs = "rollout" and correction = "{config.correction}" weigh tokens '
                'twice by the policy that generated them; set correction = "none"'
            ]
        if config.old_logprobs == "interpolated" and self.on_policy:
            return [
                'old_logprobs = "interpolated" estimates what a step with one update has without '
                'another pass; set "trainer", or several updates (mini_batch_size, epochs)'
            ]
        return []

    @property
    def data_sets(self) -> dict[str, tuple[str, ...]]:
        """Name of each data set beside the prompts -> the columns that it must have."""
        config = self.config
        mixed = isinstance(config, PretrainConfig) and config.pretrain_coef
        return {"pretrain": ("response_ids",)} if mixed else {}

    @property
    def rows_per_step(self) -> int:
        """Number of sequences that a step generates."""
        return self.config.prompts_per_step * self.config.group_size

    @property
    def rows_per_update(self) -> int:
        """Number of sequences in an optimizer step."""
        return min(self.config.mini_batch_size or self.rows_per_step, self.rows_per_step)

    def updates_per_step(self) -> int:
        """Return the number of optimizer steps; the last of an epoch may have fewer sequences."""
        size = self.config.mini_batch_size or self.rows_per_step
        return -(-self.rows_per_step // size) * self.config.epochs

    @property
    def reads_old_logprobs(self) -> bool:
        """Whether the policy's own logprobs are needed before the update.

        With one update per step, the ratio's old logprobs come from the loss's own forward pass;
        other settings of `old_logprobs` need none.
        """
        for_ratio = self._old == "trainer" and not self.on_policy
        return for_ratio or self.kl.reads_old_logprobs

    @property
    def _old(self) -> str:
        """The setting old_logprobs."""
        config = self.config
        return config.old_logprobs if isinstance(config, CorrectionConfig) else "trainer"

    @property
    def on_policy(self) -> bool:
        """Whether a step has one update only, so that its sequences are the policy's own."""
        return self.updates_per_step() == 1

    @property
    def corrects_staleness(self) -> bool:
        """Whether the loss knows the policy that generated: by `correction`, or as the old one."""
        config = self.config
        weighed = isinstance(config, CorrectionConfig) and config.correction != "none"
        return weighed or self._old == "rollout"

    # --- state ---

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs: the state of the KL's coefficient."""
        return self.kl.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kl.load_state_dict(state)
