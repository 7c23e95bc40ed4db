"""The policy loss that the policy-gradient algorithms share, and its settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch

from hybridflow.algorithms import functional as F
from hybridflow.core.config.validators import at_least, non_negative, positive
from hybridflow.core.loss import Loss, Term

_one_of = attrs.validators.in_


@attrs.frozen
class PolicyConfig:
    """Settings of the policy loss."""

    clip_low: float = attrs.field(default=0.2, validator=positive)
    """The ratio new/old is clipped to [1 - clip_low, 1 + clip_high]."""
    clip_high: float = attrs.field(default=0.2, validator=positive)
    dual_clip: float | None = None
    """For negative advantages the loss is at most this many times |A|; above 1 (arXiv:1912.09729)."""
    entropy_coef: float = attrs.field(default=0.0, validator=non_negative)
    """Weight of the entropy bonus."""
    correction: str = attrs.field(default="none", validator=_one_of(("none", "truncate", "mask")))
    """Importance weights old/rollout for what engine and trainer compute differently: none, truncate or mask."""
    correction_level: str = attrs.field(default="token", validator=_one_of(("token", "sequence")))
    correction_low: float = attrs.field(default=0.5, validator=positive)
    """mask: smaller weights are dropped."""
    correction_high: float = attrs.field(default=2.0, validator=positive)
    """truncate: the largest weight; mask: larger ones are dropped."""
    mini_batch_size: int = attrs.field(default=0, validator=non_negative)
    """Sequences per optimizer step; 0: all of the step's."""
    epochs: int = attrs.field(default=1, validator=at_least(1))
    """Passes over the step's sequences."""


class PolicyLoss(Loss):
    """Clipped ratio loss (arXiv:1707.06347, eq. 7), with entropy bonus, KL term and off-policy correction on demand.

    on_policy: there is one update per rollout, so old_logprobs are this forward's own and need no pass of their own.
    """

    def __init__(
        self, config: PolicyConfig, how: str, on_policy: bool = False, kl_coef: float = 0.0, kl_kind: str = "k3"
    ):
        self.config, self.how, self.on_policy, self.kl_coef, self.kl_kind = config, how, on_policy, kl_coef, kl_kind
        self.reads = ["advantages"]
        self.reads += [] if on_policy else ["old_logprobs"]
        self.reads += ["ref_logprobs"] if kl_coef else []
        self.reads += ["rollout_logprobs"] if config.correction != "none" else []
        self.needs = ["logprobs", "entropy"] if config.entropy_coef else ["logprobs"]

    def __call__(self, batch: Mapping[str, Any], outputs: Mapping[str, torch.Tensor]) -> list[Term]:
        c, mask, logprobs = self.config, batch["loss_mask"], outputs["logprobs"]
        old = logprobs.detach() if self.on_policy else batch["old_logprobs"]
        value = F.policy_ratio_loss(logprobs, old, batch["advantages"], c.clip_low, c.clip_high, c.dual_clip)
        if c.correction != "none":
            value = value * F.importance_weights(
                old,
                batch["rollout_logprobs"],
                mask,
                c.correction,
                c.correction_low,
                c.correction_high,
                c.correction_level,
            )
        ratio = (logprobs.detach() - old).clamp(-20, 20).exp()
        clipped = ((ratio < 1 - c.clip_low) | (ratio > 1 + c.clip_high)).float()
        terms = [Term("policy_loss", value, mask, self.how), Term("clip_fraction", clipped, mask, weight=0.0)]
        terms.append(Term("approx_kl", F.kl_estimate(old, logprobs.detach(), "k3"), mask, weight=0.0))
        if c.entropy_coef:
            terms.append(Term("entropy", outputs["entropy"], mask, self.how, weight=-c.entropy_coef))
        if self.kl_coef:
            kl = F.kl_estimate(logprobs, batch["ref_logprobs"], self.kl_kind, in_loss=True)
            terms.append(Term("kl_loss", kl, mask, self.how, weight=self.kl_coef))
        return terms
