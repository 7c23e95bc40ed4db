"""The settings and the policy loss that the policy-gradient algorithms share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch

from hybridflow.algorithms import functional as F
from hybridflow.core.contracts.loss import Loss, Term
from hybridflow.core.validators import at_least, non_negative, positive

one_of = attrs.validators.in_
AGGREGATIONS = one_of(
    ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
)

KL_PLACES, KL_KINDS = one_of(("reward", "loss")), one_of(("k1", "abs", "k2", "k3"))


@attrs.frozen
class PolicyConfig:
    """Settings of the policy loss and of the KL to the reference."""

    prompts_per_step: int = attrs.field(default=64, validator=at_least(1))
    """Prompts drawn per step."""
    group_size: int = attrs.field(default=1, validator=at_least(1))
    """Responses per prompt."""
    mini_batch_size: int = attrs.field(default=0, validator=non_negative)
    """Sequences per optimizer step; 0: all of the step's."""
    epochs: int = attrs.field(default=1, validator=at_least(1))
    """Passes over the step's sequences."""
    clip_low: float = attrs.field(default=0.2, validator=positive)
    """The ratio new/old is clipped to [1 - clip_low, 1 + clip_high]."""
    clip_high: float = attrs.field(default=0.2, validator=positive)
    dual_clip: float | None = None
    """For negative advantages the loss is at most this many times |A|; above 1 (arXiv:1912.09729)."""
    how: str = attrs.field(default="token-mean", validator=AGGREGATIONS)
    """The mean of the loss: over all tokens; over each response, then over responses; or sums over responses, as they
    are or divided by `length`."""
    length: int = attrs.field(default=0, validator=non_negative)
    """The constant of seq-mean-token-sum-norm, in tokens."""
    entropy_coef: float = attrs.field(default=0.0, validator=non_negative)
    """Weight of the entropy bonus."""
    kl_coef: float = attrs.field(default=0.0, validator=non_negative)
    """beta: weight of the KL to the reference; 0 needs no reference."""
    kl_in: str = attrs.field(default="loss", validator=KL_PLACES)
    """Where that KL is paid: in each token's reward, or as a term of the loss."""
    kl_kind: str = attrs.field(default="k3", validator=KL_KINDS)
    """The estimator of that KL; k1 in the reward only."""
    kl_target: float | None = attrs.field(default=None, validator=positive)
    """Adaptive coefficient: beta follows this KL per token (arXiv:1909.08593, section 2.2); none: fixed."""
    kl_horizon: float = attrs.field(default=10_000.0, validator=positive)
    """Sequences over which the adaptive beta moves."""
    pretrain_coef: float = attrs.field(default=0.0, validator=non_negative)
    """Weight of the next-token loss on rows of [pretrain] in each of the actor's updates (PPO-ptx, arXiv:2203.02155); 0
    needs none."""
    pretrain_batch_size: int = attrs.field(default=64, validator=at_least(1))
    """Rows of [pretrain] per update."""
    correction: str = attrs.field(default="none", validator=one_of(("none", "truncate", "mask")))
    """Importance weights old/rollout for what engine and trainer compute differently: none, truncate or mask."""
    correction_level: str = attrs.field(default="token", validator=one_of(("token", "sequence")))
    correction_low: float = attrs.field(default=0.5, validator=positive)
    """mask: smaller weights are dropped."""
    correction_high: float = attrs.field(default=2.0, validator=positive)
    """truncate: the largest weight; mask: larger ones are dropped."""


@attrs.frozen
class RewardKLConfig(PolicyConfig):
    """The same, with a KL that rewards pay."""

    kl_coef: float = attrs.field(default=0.05, validator=non_negative)
    """beta: weight of the KL to the reference; 0 needs no reference."""
    kl_in: str = attrs.field(default="reward", validator=KL_PLACES)
    """Where that KL is paid: in each token's reward (the papers'), or as a term of the loss."""
    kl_kind: str = attrs.field(default="k1", validator=KL_KINDS)
    """The estimator of that KL; k1 in the reward only."""


class PolicyLoss(Loss):
    """Clipped ratio loss (arXiv:1707.06347, eq. 7), with entropy bonus, KL term and off-policy correction on demand.

    on_policy: there is one update per rollout, so old_logprobs are this forward's own and need no pass of their own.
    kl_coef: weight of the KL in the loss.
    """

    def __init__(self, config: PolicyConfig, on_policy: bool = False, kl_coef: float = 0.0):
        self.config, self.on_policy, self.kl_coef = config, on_policy, kl_coef
        self.reads = ["advantages"]
        self.reads += [] if on_policy else ["old_logprobs"]
        self.reads += ["ref_logprobs"] if kl_coef else []
        self.reads += ["rollout_logprobs"] if config.correction != "none" else []
        self.needs = ["logprobs", "entropy"] if config.entropy_coef else ["logprobs"]

    def surrogate(self, logprobs, old, advantages, mask) -> torch.Tensor:
        """The loss per token, [B, T]."""
        c = self.config
        return F.policy_ratio_loss(logprobs, old, advantages, c.clip_low, c.clip_high, c.dual_clip)

    def ratio(self, logprobs, old, mask) -> torch.Tensor:
        """What is clipped, per token, [B, T]; for figures."""
        return (logprobs - old).clamp(-20, 20).exp()

    def __call__(self, batch: Mapping[str, Any], outputs: Mapping[str, torch.Tensor]) -> list[Term]:
        c, mask, logprobs = self.config, batch["loss_mask"], outputs["logprobs"]
        old = logprobs.detach() if self.on_policy else batch["old_logprobs"]
        value = self.surrogate(logprobs, old, batch["advantages"], mask)
        if c.correction != "none":
            low, high = c.correction_low, c.correction_high
            value = value * F.importance_weights(
                old, batch["rollout_logprobs"], mask, c.correction, low, high, c.correction_level
            )
        ratio = self.ratio(logprobs.detach(), old, mask)
        clipped = ((ratio < 1 - c.clip_low) | (ratio > 1 + c.clip_high)).float()
        mean = {"mask": mask, "how": c.how, "length": c.length or None}
        terms = [
            Term("policy_loss", value, **mean),
            Term("clip_fraction", clipped, mask, weight=0.0),
        ]
        terms.append(
            Term("approx_kl", F.kl_estimate(old, logprobs.detach(), "k3"), mask, weight=0.0)
        )
        if c.entropy_coef:
            terms.append(Term("entropy", outputs["entropy"], **mean, weight=-c.entropy_coef))
        if self.kl_coef:
            kl = F.kl_estimate(logprobs, batch["ref_logprobs"], c.kl_kind, in_loss=True)
            terms.append(Term("kl_loss", kl, **mean, weight=self.kl_coef))
        return terms
