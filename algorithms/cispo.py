"""CISPO: the importance weight is clipped instead of the loss, so that no token loses its gradient.

The source is MiniMax-M1 (arXiv:2506.13585).
"""

from __future__ import annotations

import attrs

from hybridflow.algorithms import functional as F
from hybridflow.algorithms.grpo import GRPO, GroupConfig
from hybridflow.algorithms.policy import AGGREGATIONS, AggregationConfig, PolicyLoss
from hybridflow.core.validators import positive


@attrs.frozen
class CISPOConfig(GroupConfig, AggregationConfig):
    """Settings of GRPO with the weight new/old clipped instead of the loss (arXiv:2506.13585)."""

    clip_low: float = attrs.field(default=1.0, validator=positive)
    """Lower limit of the weight new/old, 1 - clip_low; 1 or more is no limit, as in the paper."""
    clip_high: float = attrs.field(default=2.0, validator=positive)
    """Upper limit of the weight, 1 + clip_high; the paper tunes it and states no value."""
    how: str = attrs.field(default="token-mean", validator=AGGREGATIONS)
    """How the loss is averaged; the paper takes the mean over all tokens."""


class CISPOLoss(PolicyLoss):
    """The loss -sg(clip(ratio)) A logprob per token (arXiv:2506.13585)."""

    def surrogate(self, logprobs, old, advantages, mask):
        """Return the loss per token; inputs and result are [B, T]."""
        return F.cispo_loss(logprobs, old, advantages, self.config.clip_low, self.config.clip_high)


class CISPO(GRPO):
    """GRPO's step with CISPOLoss, which clips the importance weight instead of the loss."""

    Config = CISPOConfig
    loss = CISPOLoss
