"""The KL of the policy to its reference.

It is subtracted from rewards, or a term of the loss; its coefficient is fixed, or adaptive.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch

from hybridflow.algorithms import functional as F
from hybridflow.core.contracts.role import Role
from hybridflow.core.validators import non_negative, positive
from hybridflow.core.values.batch import Batch

KL_PLACES = attrs.validators.in_(("reward", "loss"))
KL_KINDS = attrs.validators.in_(("k1", "abs", "k2", "k3"))


@attrs.frozen(slots=False)
class KLConfig:
    """Settings of the KL to the reference, a term of the loss by default."""

    kl_coef: float = attrs.field(default=0.0, validator=non_negative)
    """beta: weight of the KL to the reference; 0 needs no reference."""
    kl_in: str = attrs.field(default="loss", validator=KL_PLACES)
    """Where the KL acts: subtracted from each token's reward, or as a term of the loss."""
    kl_kind: str = attrs.field(default="k3", validator=KL_KINDS)
    """The estimator of that KL; k1 in the reward only."""
    kl_target: float | None = attrs.field(default=None, validator=positive)
    """KL per token that an adaptive beta aims at (arXiv:1909.08593, section 2.2); none: beta is
    fixed."""
    kl_horizon: float = attrs.field(default=10_000.0, validator=positive)
    """Number of sequences over which the adaptive beta moves."""


@attrs.frozen(slots=False)
class RewardKLConfig(KLConfig):
    """Settings of the KL to the reference, subtracted from rewards by default, as in the papers."""

    kl_coef: float = attrs.field(default=0.05, validator=non_negative)
    """beta: weight of the KL to the reference; 0 needs no reference."""
    kl_in: str = attrs.field(default="reward", validator=KL_PLACES)
    """Where the KL acts: subtracted from each token's reward, as in the papers, or as a term of the
    loss."""
    kl_kind: str = attrs.field(default="k1", validator=KL_KINDS)
    """The estimator of that KL; k1 in the reward only."""


class ReferenceKL:
    """The penalty beta KL(policy || reference), by the settings kl_*.

    Without kl_coef there is no KL, and no reference.
    """

    def __init__(self, config: KLConfig):
        self.config = config
        self.adaptive: F.AdaptiveKL | None = None
        if config.kl_coef and config.kl_target:
            self.adaptive = F.AdaptiveKL(config.kl_coef, config.kl_target, config.kl_horizon)

    def problems(self, rows: int) -> list[str]:
        """Return what is wrong with the settings, for steps of `rows` sequences."""
        # AdaptiveKL.update would raise these during the run; here they are found before it.
        config = self.config
        problems = []
        if config.kl_target and rows >= 5 * config.kl_horizon:
            problems.append(
                f"kl_horizon {config.kl_horizon:g} is too small for the {rows} sequences of a "
                "step: one could make beta negative; set it above a fifth of them"
            )
        if config.kl_target and not config.kl_coef:
            problems.append("kl_target needs kl_coef > 0, the coefficient to begin with")
        if config.kl_coef and config.kl_in == "loss" and config.kl_kind == "k1":
            problems.append(
                'kl_kind "k1" has no gradient on policy as a loss: '
                'use "k2" or "k3", or kl_in = "reward"'
            )
        return problems

    def roles(self) -> tuple[Role, ...]:
        """Return the role of the reference, where there is a KL."""
        return (Role("ref"),) if self.config.kl_coef else ()

    @property
    def beta(self) -> float:
        """The coefficient at this step."""
        return self.adaptive.value if self.adaptive else self.config.kl_coef

    @property
    def in_loss(self) -> float:
        """The coefficient of the KL term of the loss; 0 where rewards have the KL."""
        return self.beta if self.config.kl_in == "loss" else 0.0

    @property
    def reads_old_logprobs(self) -> bool:
        """Whether the policy's own logprobs are needed before the update."""
        return bool(self.config.kl_coef and (self.config.kl_in == "reward" or self.adaptive))

    def penalty(
        self,
        loss_mask: torch.Tensor,
        old: torch.Tensor | None = None,
        ref: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return the penalty to subtract from each token's reward, beta kl_t [B, T], and metrics.

        It is 0 where the loss has the KL, or where there is none. All inputs are [B, T].
        """
        # The columns are missing where kl_coef is 0, or where nothing needs old_logprobs.
        if ref is None or old is None:
            return torch.zeros(loss_mask.shape), {}
        kl = F.kl_estimate(old, ref, self.config.kl_kind)
        figures = {"kl": F.masked_mean(kl, loss_mask), "beta": self.beta}

        # Where the loss has the KL, it is only a metric here.
        paid = self.beta if self.config.kl_in == "reward" else 0.0
        return paid * kl.masked_fill(loss_mask == 0, 0.0), figures

    def follow(self, advantages: Batch, rows: int) -> None:
        """Move an adaptive beta by the KL of the step's `rows` sequences.

        `advantages` holds that KL among its metrics.
        """
        if self.adaptive:
            self.adaptive.update(advantages.metrics["kl"], rows)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs: the adaptive coefficient, where there is one."""
        return {"adaptive": self.adaptive.state_dict()} if self.adaptive else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from the state of a checkpoint."""
        if self.adaptive:
            self.adaptive.load_state_dict(state["adaptive"])
