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
    """GRPO's settings, but that the weight new/old is clipped, not the loss (arXiv:2506.13585)."""

    clip_low: float = attrs.field(default=1.0, validator=positive)
    """The weight new/old is at least 1 - clip_low; 1 or more, as in the paper, sets no limit."""
    clip_high: float = attrs.field(default=2.0, validator=positive)
    """The weight is at most 1 + clip_high; the paper tunes this one, and names no value."""
    how: str = attrs.field(default="token-mean", validator=AGGREGATIONS)
    """Mean over all tokens (the paper's); or another."""


class CISPOLoss(PolicyLoss):
    """The loss -sg(clip(ratio)) A logprob of each token (arXiv:2506.13585)."""

    def surrogate(self, logprobs, old, advantages, mask):
        """Return the loss per token; inputs and result are [B, T]."""
        return F.cispo_loss(logprobs, old, advantages, self.config.clip_low, self.config.clip_high)


class CISPO(GRPO):
    """GRPO's step with another loss: the weight is clipped."""

    Config = CISPOConfig
    loss = CISPOLoss
