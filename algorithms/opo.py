"""OPO: one update per rollout, and the baseline of the least variance, a mean weighed by length.

The source is arXiv:2505.23585.
"""

from __future__ import annotations

import attrs

from hybridflow.algorithms import functional as F
from hybridflow.algorithms.grpo import GRPO
from hybridflow.algorithms.policy import AGGREGATIONS, ClippedConfig, CorrectionConfig
from hybridflow.algorithms.policy_gradient import PretrainConfig
from hybridflow.algorithms.reference_kl import KLConfig
from hybridflow.core.contracts.rollout import SamplingParams
from hybridflow.core.validators import at_least


@attrs.frozen
class OPOConfig(ClippedConfig, CorrectionConfig, KLConfig, PretrainConfig):
    """Settings of on-policy RL with the optimal reward baseline."""

    group_size: int = attrs.field(default=8, validator=at_least(2))
    """Responses per prompt, K in the paper."""
    how: str = attrs.field(default="token-mean", validator=AGGREGATIONS)
    """How the loss is averaged; in verl, which has the authors' implementation, over all tokens."""


class OPO(GRPO):
    """GRPO's step with one update, and advantages from a baseline weighed by length."""

    Config = OPOConfig

    def problems(self, sampling: SamplingParams) -> list[str]:
        problems = super().problems(sampling)
        if not self.on_policy:
            problems.append(
                f"opo is exactly on-policy, and these settings take {self.updates_per_step()} "
                "updates a step; leave out mini_batch_size and epochs"
            )
        return problems

    def advantages(self, scores, group, loss_mask, old_logprobs=None, ref_logprobs=None):
        """Return for every token the score [B] of its response, less its group's baseline."""
        penalty, figures = self.kl.penalty(loss_mask, old_logprobs, ref_logprobs)
        centered = F.length_weighted(scores - penalty.sum(1), group, loss_mask.sum(1))
        return {"advantages": centered[:, None] * loss_mask, **figures}
