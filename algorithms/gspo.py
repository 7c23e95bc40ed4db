"""GSPO: GRPO with one importance ratio per response, the geometric mean of its tokens' (arXiv:2507.18071)."""

from __future__ import annotations

import attrs

from hybridflow.algorithms import functional as F
from hybridflow.algorithms.grpo import GRPO, GRPOConfig
from hybridflow.algorithms.policy import PolicyLoss, one_of
from hybridflow.core.validators import positive


@attrs.frozen
class GSPOConfig(GRPOConfig):
    """Group sequence policy optimisation."""

    clip_low: float = attrs.field(default=3e-4, validator=positive)
    """The response's ratio new/old is clipped to [1 - clip_low, 1 + clip_high]."""
    clip_high: float = attrs.field(default=4e-4, validator=positive)
    how: str = attrs.field(
        default="seq-mean-token-mean", validator=one_of(("seq-mean-token-mean",))
    )
    """The only mean for which the loss is that of whole responses."""


class SequenceLoss(PolicyLoss):
    """Each token carries its response's ratio, and the gradient of its own logprob."""

    def surrogate(self, logprobs, old, advantages, mask):
        c = self.config
        return F.sequence_ratio_loss(
            logprobs, old, advantages, mask, c.clip_low, c.clip_high, c.dual_clip
        )

    def ratio(self, logprobs, old, mask):
        return F.sequence_ratio(logprobs, old, mask)[:, None].expand_as(logprobs)


class GSPO(GRPO):
    """GRPO's step with another ratio: the response's."""

    Config, loss = GSPOConfig, SequenceLoss
