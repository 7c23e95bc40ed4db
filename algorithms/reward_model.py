"""Reward models: a score per response, learnt from which of two responses is preferred.

The loss is that of the Bradley-Terry model (arXiv:2203.02155).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import attrs
import torch

from hybridflow.algorithms import functional as F
from hybridflow.core.contracts.algorithm import Algorithm
from hybridflow.core.contracts.loss import Loss, Term
from hybridflow.core.contracts.role import Role
from hybridflow.core.contracts.step import StepContext
from hybridflow.core.validators import at_least, non_negative


@attrs.frozen
class RewardModelConfig:
    """Settings of reward models, from preferences (data.response over data.rejected)."""

    pairs_per_step: int = attrs.field(default=64, validator=at_least(1))
    """Pairs per step, which is one optimizer step."""
    margin: float = attrs.field(default=0.0, validator=non_negative)
    """Difference that the chosen response's score should have to the other's (arXiv:2307.09288)."""


class PreferenceLoss(Loss):
    """The mean of -log sigmoid(chosen - rejected - margin) over pairs (arXiv:2203.02155, eq. 1).

    The metric accuracy is the share of pairs in the right order.
    """

    reads = ("preferred",)
    needs = ("scores",)
    unit = "pair"

    def __init__(self, margin: float = 0.0):
        self.margin = margin

    def __call__(self, batch: Mapping[str, Any], outputs: Mapping[str, torch.Tensor]) -> list[Term]:
        # Rows of a pair are neighbours, so both selections have the pairs in one order.
        preferred = batch["preferred"].bool()
        chosen = outputs["scores"][preferred]
        rejected = outputs["scores"][~preferred]

        loss = F.bradley_terry_loss(chosen, rejected, self.margin)
        right = (chosen > rejected).float()
        return [
            Term("preference_loss", loss, how="unit-mean"),
            Term("accuracy", right, how="unit-mean", weight=0.0),
        ]


class RewardModel(Algorithm):
    """An algorithm with one update per step, on pairs."""

    Config: ClassVar[type] = RewardModelConfig
    data_columns: ClassVar[tuple[str, ...]] = ("response_ids", "preferred")
    role: ClassVar[str] = "reward"
    """The role whose model is trained."""

    def roles(self) -> tuple[Role, ...]:
        return (Role(self.role, "score", trained=True),)

    @property
    def rows_per_step(self) -> int:
        """Number of responses in a step, two per pair."""
        return 2 * self.config.pairs_per_step

    def updates_per_step(self) -> int:
        return 1

    def step(self, ctx: StepContext) -> None:
        # The data brings the responses, so nothing is generated.
        pairs = ctx.prompts(self.config.pairs_per_step)
        ctx.roles[self.role].update((pairs, self.losses()[self.role]))

    def losses(self) -> dict[str, Loss]:
        return {"reward": PreferenceLoss(self.config.margin)}
