"""Settings and the policy loss that the policy-gradient algorithms share."""

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
KL_PLACES = one_of(("reward", "loss"))
KL_KINDS = one_of(("k1", "abs", "k2", "k3"))


@attrs.frozen
class PolicyConfig:
    """Settings of the policy loss and of the KL to the reference."""

    # Sizes of a step
    prompts_per_step: int = attrs.field(default=64, validator=at_least(1))
    """Prompts drawn per step."""
    group_size: int = attrs.field(default=1, validator=at_least(1))
    """Responses per prompt."""
    mini_batch_size: int = attrs.field(default=0, validator=non_negative)
    """Sequences per optimizer step; 0: all of the step's."""
    epochs: int = attrs.field(default=1, validator=at_least(1))
    """Passes over the step's sequences."""

    # The loss
    clip_low: float = attrs.field(default=0.2, validator=positive)
    """Lower limit: the ratio new/old is clipped to [1 - clip_low, 1 + clip_high]."""
    clip_high: float = attrs.field(default=0.2, validator=positive)
    """Upper limit of the ratio new/old."""
    dual_clip: float | None = None
    """Bound of the loss for negative advantages, times |A|; above 1 (arXiv:1912.09729)."""
    how: str = attrs.field(default="token-mean", validator=AGGREGATIONS)
    """How the loss is averaged: over all tokens; over each response, then over responses; or as
    sums over responses, which may be divided by `length`."""
    length: int = attrs.field(default=0, validator=non_negative)
    """The constant that seq-mean-token-sum-norm divides by, in tokens."""
    entropy_coef: float = attrs.field(default=0.0, validator=non_negative)
    """Weight of the entropy bonus."""

    # The KL to the reference
    kl_coef: float = attrs.field(default=0.0, validator=non_negative)
    """beta: weight of the KL to the reference; 0 needs no reference."""
    kl_in: str = attrs.field(default="loss", validator=KL_PLACES)
    """Where that KL is paid: in each token's reward, or as a term of the loss."""
    kl_kind: str = attrs.field(default="k3", validator=KL_KINDS)
    """The estimator of that KL; k1 in the reward only."""
    kl_target: float | None = attrs.field(default=None, validator=positive)
    """KL per token that an adaptive beta aims at (arXiv:1909.08593, section 2.2); none: beta is
    fixed."""
    kl_horizon: float = attrs.field(default=10_000.0, validator=positive)
    """Number of sequences over which the adaptive beta moves."""

    # Pretraining mixed in
    pretrain_coef: float = attrs.field(default=0.0, validator=non_negative)
    """Weight of the next-token loss on rows of [pretrain] in each of the actor's updates (PPO-ptx,
    arXiv:2203.02155); 0 needs no such rows."""
    pretrain_batch_size: int = attrs.field(default=64, validator=at_least(1))
    """Rows of [pretrain] per update."""

    # Correction for a rollout policy that is not the trainer's
    correction: str = attrs.field(default="none", validator=one_of(("none", "truncate", "mask")))
    """Importance weights old/rollout against differences between engine and trainer: none, limited
    (truncate), or dropped outside a range (mask)."""
    correction_level: str = attrs.field(default="token", validator=one_of(("token", "sequence")))
    """Whether a weight is that of a token or of the sequence."""
    correction_low: float = attrs.field(default=0.5, validator=positive)
    """mask: smaller weights are dropped."""
    correction_high: float = attrs.field(default=2.0, validator=positive)
    """truncate: the largest weight; mask: larger ones are dropped."""


@attrs.frozen
class RewardKLConfig(PolicyConfig):
    """Settings of algorithms whose rewards pay the KL by default."""

    kl_coef: float = attrs.field(default=0.05, validator=non_negative)
    """beta: weight of the KL to the reference; 0 needs no reference."""
    kl_in: str = attrs.field(default="reward", validator=KL_PLACES)
    """Where that KL is paid: in each token's reward (the papers'), or as a term of the loss."""
    kl_kind: str = attrs.field(default="k1", validator=KL_KINDS)
    """The estimator of that KL; k1 in the reward only."""


class PolicyLoss(Loss):
    """The clipped ratio loss (arXiv:1707.06347, eq. 7).

        mean(w L) - entropy_coef mean(entropy) + kl_coef mean(KL)

    L is the surrogate and w the correction's weight. `on_policy` says that there is one update per
    rollout, so that old_logprobs are this forward's own and need no pass of their own. `kl_coef` is
    the weight of the KL in the loss, 0 where rewards pay it.
    """

    def __init__(self, config: PolicyConfig, on_policy: bool = False, kl_coef: float = 0.0):
        self.config = config
        self.on_policy = on_policy
        self.kl_coef = kl_coef

        # Columns of the batch that the loss reads, and outputs of the model that it needs.
        self.reads = ["advantages"]
        self.reads += [] if on_policy else ["old_logprobs"]
        self.reads += ["ref_logprobs"] if kl_coef else []
        self.reads += ["rollout_logprobs"] if config.correction != "none" else []
        self.needs = ["logprobs", "entropy"]

    def surrogate(self, logprobs, old, advantages, mask) -> torch.Tensor:
        """Return the loss L per token; inputs and result are [B, T]."""
        config = self.config
        return F.policy_ratio_loss(
            logprobs, old, advantages, config.clip_low, config.clip_high, config.dual_clip
        )

    def ratio(self, logprobs, old, mask) -> torch.Tensor:
        """Return the ratio that is clipped, for the metrics; inputs and result are [B, T]."""
        return (logprobs - old).clamp(-20, 20).exp()

    def __call__(self, batch: Mapping[str, Any], outputs: Mapping[str, torch.Tensor]) -> list[Term]:
        # With one update per rollout the policy is its own old one, as a constant.
        config = self.config
        mask = batch["loss_mask"]
        logprobs = outputs["logprobs"]
        old = logprobs.detach() if self.on_policy else batch["old_logprobs"]

        value = self.surrogate(logprobs, old, batch["advantages"], mask)
        if config.correction != "none":
            value = value * F.importance_weights(
                old,
                batch["rollout_logprobs"],
                mask,
                config.correction,
                config.correction_low,
                config.correction_high,
                config.correction_level,
            )

        # Figures without weight: how often the ratio is clipped, and how far the policy has moved.
        ratio = self.ratio(logprobs.detach(), old, mask)
        clipped = (ratio < 1 - config.clip_low) | (ratio > 1 + config.clip_high)
        moved = F.kl_estimate(old, logprobs.detach(), "k3")
        mean = {"mask": mask, "how": config.how, "length": config.length or None}
        terms = [
            Term("policy_loss", value, **mean),
            Term("clip_fraction", clipped.float(), mask, weight=0.0),
            Term("approx_kl", moved, mask, weight=0.0),
        ]
        if not config.entropy_coef:
            terms.append(Term("entropy", outputs["entropy"].detach(), mask, weight=0.0))

        # Terms with a weight: an entropy bonus, and the KL where rewards do not pay it.
        if config.entropy_coef:
            terms.append(Term("entropy", outputs["entropy"], **mean, weight=-config.entropy_coef))
        if self.kl_coef:
            kl = F.kl_estimate(logprobs, batch["ref_logprobs"], config.kl_kind, in_loss=True)
            terms.append(Term("kl_loss", kl, **mean, weight=self.kl_coef))
        return terms
