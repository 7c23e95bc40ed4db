"""Dr. GRPO: GRPO without its two biases, the division by the group's spread and by each response's length
(arXiv:2503.20783)."""

from __future__ import annotations

import attrs

from hybridflow.algorithms.grpo import GRPO, GRPOConfig
from hybridflow.algorithms.policy import AGGREGATIONS, one_of
from hybridflow.core.validators import at_least


@attrs.frozen
class DrGRPOConfig(GRPOConfig):
    """GRPO done right: scores are centred and not scaled, sums are divided by a constant length."""

    scale: str = attrs.field(default="none", validator=one_of(("std", "none")))
    """Divide a group's centred scores by their standard deviation, or not (the paper's)."""
    how: str = attrs.field(default="seq-mean-token-sum-norm", validator=AGGREGATIONS)
    """Sums over responses, divided by `length` (the paper's); or another."""
    length: int = attrs.field(default=1024, validator=at_least(1))
    """That constant, in tokens; the paper's is the longest response."""


class DrGRPO(GRPO):
    """GRPO's step with other settings: no division by the group's spread, sums divided by a constant length."""

    Config = DrGRPOConfig
