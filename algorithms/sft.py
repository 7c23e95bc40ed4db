"""Supervised fine-tuning by the next-token loss on given responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch

from hybridflow.core.contracts.algorithm import Algorithm
from hybridflow.core.contracts.loss import Loss, Term
from hybridflow.core.contracts.role import Role
from hybridflow.core.contracts.step import StepContext
from hybridflow.core.validators import at_least


@attrs.frozen
class SFTConfig:
    """Settings of supervised fine-tuning."""

    batch_size: int = attrs.field(default=128, validator=at_least(1))
    """Sequences per step, which is one optimizer step."""


class NextTokenLoss(Loss):
    """The loss -log p of each response token, as a mean over all tokens of the batch."""

    def __init__(self, weight: float = 1.0):
        self.weight = weight

    def __call__(self, batch: Mapping[str, Any], outputs: Mapping[str, torch.Tensor]) -> Term:
        return Term("nll", -outputs["logprobs"], weight=self.weight)


class SFT(Algorithm):
    """An algorithm with one update per step, on rows with a response (data.response)."""

    Config = SFTConfig
    data_columns = ("response_ids",)

    def roles(self) -> tuple[Role, ...]:
        return (Role("actor", trained=True),)

    @property
    def rows_per_step(self) -> int:
        return self.config.batch_size

    def updates_per_step(self) -> int:
        return 1

    def step(self, ctx: StepContext) -> None:
        # The data brings the responses, so nothing is generated.
        rows = ctx.prompts(self.config.batch_size)
        ctx.actor.update((rows, self.losses()["actor"]))

    def losses(self):
        return {"actor": NextTokenLoss()}
