"""Reward models: a score per response, learnt from which of two responses is preferred (Bradley-Terry; arXiv:2203.02155)."""

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
    """A score per response, from preferences (data.response over data.rejected)."""

    pairs_per_step: int = attrs.field(default=64, validator=at_least(1))
    """Pairs per step, which is one optimizer step."""
    margin: float = attrs.field(default=0.0, validator=non_negative)
    """How much the chosen response's score should exceed the other's beyond being larger (arXiv:2307.09288)."""


class PreferenceLoss(Loss):
    """-log sigmoid(chosen - rejected - margin), mean over pairs; and how many pairs are in the right order."""

    reads, needs, unit = ("preferred",), ("scores",), "pair"

    def __init__(self, margin: float = 0.0):
        self.margin = margin

    def __call__(self, batch: Mapping[str, Any], outputs: Mapping[str, torch.Tensor]) -> list[Term]:
        best = batch["preferred"].bool()
        chosen, rejected = outputs["scores"][best], outputs["scores"][~best]
        loss = F.bradley_terry_loss(chosen, rejected, self.margin)
        right = (chosen > rejected).float()
        return [
            Term("preference_loss", loss, how="unit-mean"),
            Term("accuracy", right, how="unit-mean", weight=0.0),
        ]


class RewardModel(Algorithm):
    """One update per step on pairs."""

    Config: ClassVar[type] = RewardModelConfig
    data_columns: ClassVar[tuple[str, ...]] = ("response_ids", "preferred")
    role: ClassVar[str] = "reward"
    """The model that is trained."""

    def roles(self) -> tuple[Role, ...]:
        return (Role(self.role, "score", trained=True),)

    @property
    def rows_per_step(self) -> int:
        return 2 * self.config.pairs_per_step

    def updates_per_step(self) -> int:
        return 1

    def step(self, ctx: StepContext) -> None:
        ctx.roles[self.role].update(
            (ctx.prompts(self.config.pairs_per_step), self.losses()[self.role])
        )

    def losses(self) -> dict[str, Loss]:
        return {"reward": PreferenceLoss(self.config.margin)}
