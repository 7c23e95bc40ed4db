"""Dr. GRPO: GRPO without its divisions by a group's spread and by a response's length.

The source is arXiv:2503.20783.
"""

from __future__ import annotations

import attrs

from hybridflow.algorithms.grpo import GRPO, GRPOConfig
from hybridflow.algorithms.policy import AGGREGATIONS, one_of
from hybridflow.core.validators import at_least


@attrs.frozen
class DrGRPOConfig(GRPOConfig):
    """Settings of GRPO with centred, unscaled scores and sums divided by a constant length."""

    scale: str = attrs.field(default="none", validator=one_of(("std", "none")))
    """Whether a group's centred scores are divided by their standard deviation (std; the paper's is
    none)."""
    how: str = attrs.field(default="seq-mean-token-sum-norm", validator=AGGREGATIONS)
    """How the loss is averaged; the paper sums over each response and divides by `length`."""
    length: int = attrs.field(default=1024, validator=at_least(1))
    """The constant that sums are divided by, in tokens; the paper's is the longest response."""


class DrGRPO(GRPO):
    """GRPO's step with the defaults of DrGRPOConfig."""

    Config = DrGRPOConfig
