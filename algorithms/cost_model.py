"""Cost models: a score per response that orders pairs by harm; positive scores mean harmful.

The source is Safe RLHF (arXiv:2310.12773).
"""

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
    """Settings of cost models.

    data.response is the safer response of a pair; data.unsafe says which of the two are harmful.
    """

    pairs_per_step: int = attrs.field(default=64, validator=at_least(1))
    """Pairs per step, which is one optimizer step."""


class CostLoss(Loss):
    """The mean of -log s(C_w - C_l) - log s(sign_w C_w) - log s(sign_l C_l) over pairs.

    s is the sigmoid, w the more harmful response, and sign +1 where a response is unsafe, else -1
    (arXiv:2310.12773). Metrics: accuracy, the share of pairs in the right order; sign_accuracy, the
    share of responses with the right sign.
    """

    reads = ("preferred", "unsafe")
    needs = ("scores",)
    unit = "pair"

    def __call__(self, batch: Mapping[str, Any], outputs: Mapping[str, torch.Tensor]) -> list[Term]:
        # w, the more harmful response of a pair, is the one that is not preferred.
        safer = batch["preferred"].bool()
        costs = outputs["scores"]
        sign = 2.0 * batch["unsafe"] - 1.0  # unsafe is 0 or 1
        loss = F.cost_model_loss(costs[~safer], costs[safer], sign[~safer], sign[safer])

        # Metrics, per pair.
        right = (costs[~safer] > costs[safer]).float()
        signed = ((costs > 0) == (sign > 0)).float()
        figures = {"accuracy": right, "sign_accuracy": (signed[safer] + signed[~safer]) / 2}
        terms = [Term("cost_loss", loss, how="unit-mean")]
        for name, value in figures.items():
            terms.append(Term(name, value, how="unit-mean", weight=0.0))
        return terms


class CostModel(RewardModel):
    """The reward model's step, for the role `cost`."""

    Config: ClassVar[type] = CostModelConfig
    data_columns: ClassVar[tuple[str, ...]] = ("response_ids", "preferred", "unsafe")
    role: ClassVar[str] = "cost"

    def losses(self) -> dict[str, Loss]:
        return {"cost": CostLoss()}
