"""The KL of the policy to its reference: paid by rewards, or a term of the loss; its coefficient fixed, or adaptive."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hybridflow.algorithms import functional as F
from hybridflow.algorithms.policy import PolicyConfig
from hybridflow.core.contracts.role import Role
from hybridflow.core.contracts.step import StepContext
from hybridflow.core.values.batch import Batch


class ReferenceKL:
    """beta KL(policy || reference), as the settings kl_* say; without kl_coef there is none, and no reference."""

    def __init__(self, config: PolicyConfig):
        self.config = config
        self.adaptive: F.AdaptiveKL | None = None
        if config.kl_coef and config.kl_target:
            self.adaptive = F.AdaptiveKL(config.kl_coef, config.kl_target, config.kl_horizon)

    def problems(self, rows: int) -> list[str]:
        """What is wrong with the settings, for steps of so many sequences."""
        c, problems = self.config, []
        if c.kl_target and rows >= 5 * c.kl_horizon:
            problems.append(
                f"kl_horizon {c.kl_horizon:g} is too small for the {rows} sequences of a step: one could make beta negative; "
                "set it above a fifth of them"
            )
        if c.kl_target and not c.kl_coef:
            problems.append("kl_target needs kl_coef > 0, the coefficient to begin with")
        if c.kl_coef and c.kl_in == "loss" and c.kl_kind == "k1":
            problems.append(
                'kl_kind "k1" has no gradient on policy as a loss: use "k2" or "k3", or kl_in = "reward"'
            )
        return problems

    def roles(self) -> tuple[Role, ...]:
        return (Role("ref"),) if self.config.kl_coef else ()

    @property
    def beta(self) -> float:
        """The coefficient at this step."""
        return self.adaptive.value if self.adaptive else self.config.kl_coef

    @property
    def in_loss(self) -> float:
        """The coefficient of the KL term of the loss; 0 where rewards pay the KL."""
        return self.beta if self.config.kl_in == "loss" else 0.0

    @property
    def reads_old_logprobs(self) -> bool:
        """Whether the policy's own logprobs are needed before the update."""
        return bool(self.config.kl_coef and (self.config.kl_in == "reward" or self.adaptive))

    def logprobs(self, ctx: StepContext, batch: Batch) -> list[Batch]:
        """Those of the reference, where there is one."""
        return [ctx.ref.logprobs(batch)] if self.config.kl_coef else []

    def penalty(
        self,
        loss_mask: torch.Tensor,
        old: torch.Tensor | None = None,
        ref: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """beta times the KL of each token that its reward pays, [B, T], and figures; 0 where the loss has the KL."""
        if ref is None or old is None:
            return torch.zeros(loss_mask.shape), {}
        kl = F.kl_estimate(old, ref, self.config.kl_kind)
        figures = {"kl": F.masked_mean(kl, loss_mask), "beta": self.beta}
        paid = self.beta if self.config.kl_in == "reward" else 0.0
        return paid * kl.masked_fill(loss_mask == 0, 0.0), figures

    def follow(self, advantages: Batch, rows: int) -> None:
        """Move beta by the KL that the advantages were computed with, of so many sequences."""
        if self.adaptive:
            self.adaptive.update(advantages.metrics["kl"], rows)

    def state_dict(self) -> dict[str, Any]:
        return {"adaptive": self.adaptive.state_dict()} if self.adaptive else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.adaptive:
            self.adaptive.load_state_dict(state["adaptive"])
