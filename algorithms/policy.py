"""Settings and the policy loss that the policy-gradient algorithms share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch

from hybridflow.algorithms import functional as F
from hybridflow.core.contracts.loss import Loss, Term
from hybridflow.core.validators import at_least, non_negative, positive, validator

one_of = attrs.validators.in_
AGGREGATIONS = one_of(
    ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
)

OLD_LOGPROBS = {
    "trainer": ("old_logprobs",),
    "rollout": ("rollout_logprobs",),
    "interpolated": ("rollout_logprobs", "lag"),
}
"""Values of the setting old_logprobs -> the columns that a loss reads for it."""

# An algorithm's Config names what its page uses: PolicyConfig or ClippedConfig here, and
# CorrectionConfig, KLConfig or RewardKLConfig (reference_kl.py), PretrainConfig
# (policy_gradient.py). They have no slots, so that they combine.


@attrs.frozen(slots=False)
class PolicyConfig:
    """Settings of every policy-gradient algorithm: sizes of a step, and the clipped ratio."""

    prompts_per_step: int = attrs.field(default=64, validator=at_least(1))
    """Prompts drawn per step."""
    group_size: int = attrs.field(default=1, validator=at_least(1))
    """Responses per prompt."""
    mini_batch_size: int = attrs.field(default=0, validator=non_negative)
    """Sequences per optimizer step; 0: all of the step's."""
    epochs: int = attrs.field(default=1, validator=at_least(1))
    """Passes over the step's sequences."""
    clip_low: float = attrs.field(default=0.2, validator=positive)
    """Lower limit: the ratio new/old is clipped to [1 - clip_low, 1 + clip_high]."""
    clip_high: float = attrs.field(default=0.2, validator=positive)
    """Upper limit of the ratio new/old."""
    entropy_coef: float = attrs.field(default=0.0, validator=non_negative)
    """Weight of the entropy bonus."""


@attrs.frozen(slots=False)
class DualClipConfig:
    """Setting of PPO's dual clip, which bounds the loss for negative advantages."""

    dual_clip: float | None = attrs.field(
        default=None, validator=validator(lambda value: value > 1, "above 1", "give 3, say")
    )
    """Bound of the loss for negative advantages, times |A|; above 1 (arXiv:1912.09729)."""


@attrs.frozen(slots=False)
class AggregationConfig:
    """Settings of how the loss per token is averaged."""

    how: str = attrs.field(default="token-mean", validator=AGGREGATIONS)
    """How the loss is averaged: over all tokens; over each response, then over responses; or as
    sums over responses, which may be divided by `length`."""
    length: int = attrs.field(default=0, validator=non_negative)
    """The constant that seq-mean-token-sum-norm divides by, in tokens."""


@attrs.frozen(slots=False)
class ClippedConfig(PolicyConfig, DualClipConfig, AggregationConfig):
    """Settings of PPO's clipped ratio loss."""


@attrs.frozen(slots=False)
class CorrectionConfig:
    """Settings for tokens that are not of the policy that trains on them.

    The engine differs from the trainer numerically, and its weights may be older.
    """

    old_logprobs: str = attrs.field(default="trainer", validator=one_of(OLD_LOGPROBS))
    """The old policy of the ratio new/old. "trainer": the weights of the step's start, by a pass
    over the model where the step has several updates. "rollout": the one that generated, which
    needs no pass and no correction. "interpolated": those of the step's start, estimated without a
    pass from the present ones and the one that generated (arXiv:2512.06547)."""
    correction: str = attrs.field(default="none", validator=one_of(("none", "truncate", "mask")))
    """Importance weights old/rollout against differences between engine and trainer: none, limited
    (truncate), or dropped outside a range (mask)."""
    correction_level: str = attrs.field(default="token", validator=one_of(("token", "sequence")))
    """Whether a weight is that of a token or of the sequence."""
    correction_low: float = attrs.field(default=0.5, validator=positive)
    """The smallest weight that "mask" keeps."""
    correction_high: float = attrs.field(default=2.0, validator=positive)
    """The limit to which "truncate" cuts a weight, and the largest weight that "mask" keeps."""


class PolicyLoss(Loss):
    """The clipped ratio loss (arXiv:1707.06347, eq. 7).

        mean(w L) - entropy_coef mean(entropy) + kl_coef mean(KL)

    L is the surrogate and w the correction's weight. Terms and bounds that the config does not have
    are left out.
    """

    how = "token-mean"
    """How the loss is averaged where the config does not say it (`Term.how`)."""
    length: int | None = None
    dual_clip: float | None = None
    old: str = "trainer"
    """The setting old_logprobs, where the config has it."""
    correction: CorrectionConfig | None = None

    def __init__(
        self,
        config: PolicyConfig,
        on_policy: bool = False,
        kl_coef: float = 0.0,
        kl_kind: str = "k3",
    ):
        """Read the settings.

        on_policy: there is one update per rollout, so that old_logprobs are those of the update's
        own forward pass. kl_coef: the weight of the KL in the loss, 0 where the KL is subtracted
        from rewards or where there is none; kl_kind: its estimator.
        """
        self.config = config
        self.on_policy = on_policy
        self.kl_coef = kl_coef
        self.kl_kind = kl_kind
        if isinstance(config, AggregationConfig):
            self.how = config.how
            self.length = config.length or None
        if isinstance(config, DualClipConfig):
            self.dual_clip = config.dual_clip
        if isinstance(config, CorrectionConfig):
            self.old = config.old_logprobs
            self.correction = config if config.correction != "none" else None

        # Columns of the batch that the loss reads, and outputs of the model that it needs.
        own = on_policy and self.old == "trainer"
        reads = ["advantages", *(() if own else OLD_LOGPROBS[self.old])]
        reads += ["ref_logprobs"] if kl_coef else []
        reads += ["rollout_logprobs"] if self.correction else []
        self.reads = list(dict.fromkeys(reads))
        self.needs = ["logprobs", "entropy"]

    def old_logprobs(self, batch: Mapping[str, Any], logprobs: torch.Tensor) -> torch.Tensor:
        """Return the logprobs of the policy that the ratio is taken to, [B, T].

        logprobs: the present policy's, without gradient; with one update per rollout it is its own
        old one.
        """
        if self.old == "rollout":
            return batch["rollout_logprobs"]
        if self.old == "interpolated":
            return F.interpolated_logprobs(logprobs, batch["rollout_logprobs"], batch["lag"])
        return logprobs if self.on_policy else batch["old_logprobs"]

    def surrogate(self, logprobs, old, advantages, mask) -> torch.Tensor:
        """Return the loss L per token; inputs and result are [B, T]."""
        config = self.config
        return F.policy_ratio_loss(
            logprobs, old, advantages, config.clip_low, config.clip_high, self.dual_clip
        )

    def clipped(self, logprobs, old, advantages, mask) -> torch.Tensor:
        """Return where a clip may act, for the metrics: bool [B, T], of inputs [B, T]."""
        return self.outside((logprobs - old).clamp(-20, 20).exp())

    def outside(self, ratio) -> torch.Tensor:
        """Return where a ratio is outside the limits of the config, of its shape."""
        return (ratio < 1 - self.config.clip_low) | (ratio > 1 + self.config.clip_high)

    def __call__(self, batch: Mapping[str, Any], outputs: Mapping[str, torch.Tensor]) -> list[Term]:
        config = self.config
        mask = batch["loss_mask"]
        logprobs = outputs["logprobs"]
        old = self.old_logprobs(batch, logprobs.detach())

        value = self.surrogate(logprobs, old, batch["advantages"], mask)
        if self.correction is not None:
            limits = self.correction
            value = value * F.importance_weights(
                old,
                batch["rollout_logprobs"],
                mask,
                limits.correction,
                limits.correction_low,
                limits.correction_high,
                limits.correction_level,
            )

        # Figures without weight: how often the ratio is clipped, and how far the policy has moved.
        clipped = self.clipped(logprobs.detach(), old, batch["advantages"], mask)
        moved = F.kl_estimate(old, logprobs.detach(), "k3")
        mean = {"mask": mask, "how": self.how, "length": self.length}
        terms = [
            Term("policy_loss", value, **mean),
            Term("clip_fraction", clipped.float(), mask, weight=0.0),
            Term("approx_kl", moved, mask, weight=0.0),
        ]
        if not config.entropy_coef:
            terms.append(Term("entropy", outputs["entropy"].detach(), mask, weight=0.0))

        # Terms with a weight: an entropy bonus, and the KL where it is not subtracted from rewards.
        if config.entropy_coef:
            terms.append(Term("entropy", outputs["entropy"], **mean, weight=-config.entropy_coef))
        if self.kl_coef:
            kl = F.kl_estimate(logprobs, batch["ref_logprobs"], self.kl_kind, in_loss=True)
            terms.append(Term("kl_loss", kl, **mean, weight=self.kl_coef))
        return terms
