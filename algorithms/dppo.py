"""DPPO: GRPO in which a token leaves the update by how far its probability has moved.

A ratio says little of that: from 1e-5 to 1e-3 it is 100, and from 0.99 to 0.8 it is 0.8. The source
is arXiv:2602.04879; the defaults are its authors', in verl's recipe.
"""

from __future__ import annotations

import attrs
import torch

from hybridflow.algorithms import functional as F
from hybridflow.algorithms.grpo import GRPO, GroupConfig
from hybridflow.algorithms.policy import (
    AGGREGATIONS,
    OLD_LOGPROBS,
    AggregationConfig,
    PolicyLoss,
    one_of,
)
from hybridflow.core.validators import at_least, positive


@attrs.frozen
class DPPOConfig(GroupConfig, AggregationConfig):
    """Settings of divergence proximal policy optimisation, in its binary forms."""

    divergence: str = attrs.field(default="tv", validator=one_of(("tv", "kl")))
    """What says how far a token's probability has moved: the total variation, or the KL divergence,
    both between the token and all others together."""
    clip_low: float = attrs.field(default=0.15, validator=positive)
    """How far it may have fallen where the advantage is negative; the authors' is 0.05 with kl."""
    clip_high: float = attrs.field(default=0.15, validator=positive)
    """How far it may have risen where the advantage is positive; the authors' is 0.05 with kl."""
    most_ratio: float = attrs.field(default=20.0, validator=at_least(1))
    """The limit of a token's weight, its ratio new/old."""
    old_logprobs: str = attrs.field(default="rollout", validator=one_of(OLD_LOGPROBS))
    """The old policy (see grpo); the authors measure from the one that generated."""
    scale: str = attrs.field(default="none", validator=one_of(("std", "none")))
    """Whether a group's centred scores are divided by their standard deviation; the authors' are
    not."""
    how: str = attrs.field(default="token-mean", validator=AGGREGATIONS)
    """How the loss is averaged; the authors' is seq-mean-token-sum-norm, which needs `length`."""


class DivergenceLoss(PolicyLoss):
    """The loss -M sg(min(ratio, most_ratio)) A logprob per token."""

    config: DPPOConfig

    def surrogate(self, logprobs, old, advantages, mask) -> torch.Tensor:
        """Return the loss per token; inputs and result are [B, T]."""
        limits = (*self.limits, self.config.most_ratio)
        return F.divergence_loss(logprobs, old, advantages, *limits)

    def clipped(self, logprobs, old, advantages, mask) -> torch.Tensor:
        """Return where a token has left the update, bool [B, T]."""
        return F.diverged(logprobs, old, advantages, *self.limits)

    @property
    def limits(self) -> tuple[str, float, float]:
        """What is measured, and how much of it a token may fall and rise."""
        return self.config.divergence, self.config.clip_low, self.config.clip_high


class DPPO(GRPO):
    """GRPO's step with DivergenceLoss."""

    Config = DPPOConfig
    loss = DivergenceLoss
