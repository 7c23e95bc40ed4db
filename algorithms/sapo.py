"""SAPO: GRPO with a smooth gate on each token's ratio in the place of its clip.

The source is arXiv:2511.20347; the defaults are the paper's, as in TRL and verl.
"""

from __future__ import annotations

import attrs
import torch

from hybridflow.algorithms import functional as F
from hybridflow.algorithms.grpo import GRPO, GroupConfig
from hybridflow.algorithms.policy import AGGREGATIONS, AggregationConfig, PolicyLoss
from hybridflow.core.validators import positive


@attrs.frozen
class SAPOConfig(GroupConfig, AggregationConfig):
    """Settings of soft adaptive policy optimisation. Its clips are for the metric clip_fraction."""

    tau_pos: float = attrs.field(default=1.0, validator=positive)
    """How fast the gradient falls with the ratio's distance from 1, where the advantage is above
    0."""
    tau_neg: float = attrs.field(default=1.05, validator=positive)
    """The same where it is not; larger, since such tokens raise many others that were not
    sampled."""
    how: str = attrs.field(default="seq-mean-token-mean", validator=AGGREGATIONS)
    """How the loss is averaged; the paper's is the mean over each response, then over responses."""


class SoftGateLoss(PolicyLoss):
    """The loss -(4 / tau) sigmoid(tau (ratio - 1)) A per token."""

    config: SAPOConfig

    def surrogate(self, logprobs, old, advantages, mask) -> torch.Tensor:
        """Return the loss per token; inputs and result are [B, T]."""
        return F.soft_gate_loss(logprobs, old, advantages, self.config.tau_pos, self.config.tau_neg)


class SAPO(GRPO):
    """GRPO's step with SoftGateLoss."""

    Config = SAPOConfig
    loss = SoftGateLoss
