"""DPO: the policy learns preferences directly, without a reward model (arXiv:2305.18290)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch

from hybridflow.algorithms import functional as F
from hybridflow.core.contracts.algorithm import Algorithm
from hybridflow.core.contracts.loss import Loss, Term
from hybridflow.core.contracts.role import Role
from hybridflow.core.contracts.rollout import SamplingParams
from hybridflow.core.contracts.step import StepContext
from hybridflow.core.validators import at_least, positive


@attrs.frozen
class DPOConfig:
    """Settings of direct preference optimisation (data.response over data.rejected)."""

    pairs_per_step: int = attrs.field(default=64, validator=at_least(1))
    """Pairs drawn per step."""
    mini_batch_size: int = attrs.field(default=0, validator=at_least(0))
    """Sequences (two per pair) per optimizer step; 0: all of the step's."""
    beta: float = attrs.field(default=0.1, validator=positive)
    """Weight of the log ratio to the reference: small values let the policy go further from it."""


class DPOLoss(Loss):
    """The mean of -log sigmoid(beta (gain of the chosen - gain of the rejected)) over pairs.

    The gain is a response's log ratio to the reference (arXiv:2305.18290, eq. 7).
    """

    reads = ("ref_logprobs", "preferred")
    unit = "pair"

    def __init__(self, beta: float):
        self.beta = beta

    def __call__(self, batch: Mapping[str, Any], outputs: Mapping[str, torch.Tensor]) -> list[Term]:
        # Log-probabilities of complete responses, [B]; pairs are neighbouring rows.
        mask = batch["loss_mask"]
        best = batch["preferred"].bool()
        policy = (outputs["logprobs"] * mask).sum(-1)
        ref = (batch["ref_logprobs"] * mask).sum(-1)
        loss = F.dpo_loss(policy[best], policy[~best], ref[best], ref[~best], self.beta)

        # Before the first update policy and reference are equal; a tie is half right.
        gain = policy - ref
        margin = self.beta * (gain[best] - gain[~best]).detach()
        right = (margin > 0).float() + 0.5 * (margin == 0).float()
        figures = {"accuracy": right, "margin": margin, "chosen_logprob": policy[best].detach()}
        terms = [Term("dpo_loss", loss, how="unit-mean")]
        for name, value in figures.items():
            terms.append(Term(name, value, how="unit-mean", weight=0.0))
        return terms


class DPO(Algorithm):
    """Updates the actor on pairs of a preferred and a rejected response (arXiv:2305.18290)."""

    Config = DPOConfig
    data_columns = ("response_ids", "preferred")

    def roles(self) -> tuple[Role, ...]:
        return (Role("actor", trained=True), Role("ref"))

    def problems(self, sampling: SamplingParams) -> list[str]:
        # A pair is two sequences, and is not split.
        size = self.config.mini_batch_size
        if size % 2 or size > self.rows_per_step:
            return [
                f"mini_batch_size {size} must be even (pairs) and at most the "
                f"{self.rows_per_step} sequences of a step"
            ]
        return []

    @property
    def rows_per_step(self) -> int:
        """Number of sequences in a step, two per pair."""
        return 2 * self.config.pairs_per_step

    @property
    def rows_per_update(self) -> int:
        """Number of sequences in an optimizer step."""
        return min(self.config.mini_batch_size or self.rows_per_step, self.rows_per_step)

    def updates_per_step(self) -> int:
        return -(-self.rows_per_step // (self.config.mini_batch_size or self.rows_per_step))

    def step(self, ctx: StepContext) -> None:
        # The data brings the responses, so nothing is generated.
        batch = ctx.prompts(self.config.pairs_per_step)
        batch = batch.join(ctx.ref.logprobs(batch))
        for mini in ctx.minibatches(batch, self.config.mini_batch_size or batch.rows, unit=2):
            ctx.actor.update((mini, self.losses()["actor"]))

    def losses(self):
        return {"actor": DPOLoss(self.config.beta)}
