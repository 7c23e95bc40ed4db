"""Cost models: a score per response that orders pairs by harm, and whose sign says whether a response is harmful
(Safe RLHF, arXiv:2310.12773)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import attrs
import torch

from hybridflow.algorithms import functional as F
from hybridflow.algorithms.reward_model import RewardModel
from hybridflow.core.contracts.loss import Loss, Term
from hybridflow.core.validators import at_least


@attrs.frozen
class CostModelConfig:
    """A cost per response: data.response is the safer one of a pair, data.unsafe says which of the two are harmful."""

    pairs_per_step: int = attrs.field(default=64, validator=at_least(1))
    """Pairs per step, which is one optimizer step."""


class CostLoss(Loss):
    """-log s(C_w - C_l) - log s(sign_w C_w) - log s(sign_l C_l), mean over pairs; w is the more harmful response, sign +1
    where a response is unsafe, else -1."""

    reads, needs, unit = ("preferred", "unsafe"), ("scores",), "pair"

    def __call__(self, batch: Mapping[str, Any], outputs: Mapping[str, torch.Tensor]) -> list[Term]:
        safer, costs = batch["preferred"].bool(), outputs["scores"]
        sign = 2.0 * batch["unsafe"] - 1.0
        loss = F.cost_model_loss(costs[~safer], costs[safer], sign[~safer], sign[safer])
        right = (costs[~safer] > costs[safer]).float()
        signed = ((costs > 0) == (sign > 0)).float()
        figures = {"accuracy": right, "sign_accuracy": (signed[safer] + signed[~safer]) / 2}
        return [
            Term("cost_loss", loss, how="unit-mean"),
            *(Term(name, value, how="unit-mean", weight=0.0) for name, value in figures.items()),
        ]


class CostModel(RewardModel):
    """The same step, for role `cost`."""

    Config: ClassVar[type] = CostModelConfig
    data_columns: ClassVar[tuple[str, ...]] = ("response_ids", "preferred", "unsafe")
    role: ClassVar[str] = "cost"

    def losses(self) -> dict[str, Loss]:
        return {"cost": CostLoss()}
