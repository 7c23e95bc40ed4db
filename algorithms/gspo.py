"""GSPO: GRPO with one importance ratio per response, the geometric mean of its tokens' ratios.

The source is arXiv:2507.18071.
"""

from __future__ import annotations

import attrs

from hybridflow.algorithms import functional as F
from hybridflow.algorithms.grpo import GRPO, GroupConfig
from hybridflow.algorithms.policy import DualClipConfig, PolicyLoss
from hybridflow.core.validators import positive


@attrs.frozen
class GSPOConfig(GroupConfig, DualClipConfig):
    """Settings of group sequence policy optimisation."""

    clip_low: float = attrs.field(default=3e-4, validator=positive)
    """Lower limit: the response's ratio new/old is clipped to [1 - clip_low, 1 + clip_high]."""
    clip_high: float = attrs.field(default=4e-4, validator=positive)
    """Upper limit of the response's ratio."""


class SequenceLoss(PolicyLoss):
    """A loss in which each token has its response's ratio, and its own logprob's gradient."""

    # The only mean for which the loss is that of complete responses.
    how = "seq-mean-token-mean"

    def surrogate(self, logprobs, old, advantages, mask):
        """Return the loss per token; inputs and result are [B, T]."""
        # The tokens of a response have one ratio, and are clipped together.
        config = self.config
        limits = (config.clip_low, config.clip_high, self.dual_clip)
        return F.sequence_ratio_loss(logprobs, old, advantages, mask, *limits)

    def clipped(self, logprobs, old, advantages, mask):
        """Return on each token whether its response's ratio is outside the limits, bool [B, T]."""
        return self.outside(F.sequence_ratio(logprobs, old, mask))[:, None].expand_as(logprobs)


class GSPO(GRPO):
    """GRPO's step with one importance ratio per response instead of one per token."""

    Config = GSPOConfig
    loss = SequenceLoss
