"""GMPO: GRPO with the geometric mean of a response's ratios, each of which is clipped by itself.

The source is arXiv:2507.20673; the defaults are the paper's, as in TRL.
"""

from __future__ import annotations

import attrs
import torch

from hybridflow.algorithms import functional as F
from hybridflow.algorithms.grpo import GRPO, GroupConfig
from hybridflow.algorithms.policy import PolicyLoss
from hybridflow.core.validators import positive


@attrs.frozen
class GMPOConfig(GroupConfig):
    """Settings of geometric-mean policy optimisation."""

    clip_low: float = attrs.field(default=0.4, validator=positive)
    """Lower limit of a token's log ratio new/old, -clip_low: the ratio is at least exp(-0.4)."""
    clip_high: float = attrs.field(default=0.4, validator=positive)
    """Upper limit of a token's log ratio."""


class GeometricMeanLoss(PolicyLoss):
    """The loss -exp(mean clipped log ratio of the response) A."""

    # The only mean for which the loss is that of complete responses.
    how = "seq-mean-token-mean"

    def surrogate(self, logprobs, old, advantages, mask) -> torch.Tensor:
        """Return the loss per token; inputs and result are [B, T]."""
        limits = (self.config.clip_low, self.config.clip_high)
        return F.geometric_mean_loss(logprobs, old, advantages, mask, *limits)

    def clipped(self, logprobs, old, advantages, mask) -> torch.Tensor:
        """Return where a token's log ratio is outside the limits, bool [B, T]."""
        return self.outside(1 + logprobs - old)


class GMPO(GRPO):
    """GRPO's step with GeometricMeanLoss."""

    Config = GMPOConfig
    loss = GeometricMeanLoss
