"""CISPO: the importance weight is clipped instead of the loss, so that no token loses its gradient (MiniMax-M1,
arXiv:2506.13585)."""

from __future__ import annotations

import attrs

from hybridflow.algorithms import functional as F
from hybridflow.algorithms.grpo import GRPO, GRPOConfig
from hybridflow.algorithms.policy import AGGREGATIONS, PolicyLoss
from hybridflow.core.validators import positive


@attrs.frozen
class CISPOConfig(GRPOConfig):
    """Clipped importance-sampling policy optimisation."""

    clip_low: float = attrs.field(default=1.0, validator=positive)
    """The weight new/old is at least 1 - clip_low; 1 or more leaves that side open (the paper's)."""
    clip_high: float = attrs.field(default=2.0, validator=positive)
    """The weight is at most 1 + clip_high; the paper tunes this side alone, and names no value."""
    how: str = attrs.field(default="token-mean", validator=AGGREGATIONS)
    """Mean over all tokens (the paper's); or another."""


class CISPOLoss(PolicyLoss):
    """-sg(clip(ratio)) A logprob of each token."""

    def surrogate(self, logprobs, old, advantages, mask):
        return F.cispo_loss(logprobs, old, advantages, self.config.clip_low, self.config.clip_high)


class CISPO(GRPO):
    """GRPO's step with another loss: the weight is clipped."""

    Config, loss = CISPOConfig, CISPOLoss

    def problems(self) -> list[str]:
        found = super().problems()
        return found + (
            ["dual_clip has no meaning in CISPO's loss; leave it out"]
            if self.config.dual_clip
            else []
        )
