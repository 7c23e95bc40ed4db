"""RLOO: REINFORCE whose baseline is the mean reward of the other responses to the prompt (arXiv:2402.14740)."""

from __future__ import annotations

import attrs

from hybridflow.algorithms import functional as F
from hybridflow.algorithms.policy import AGGREGATIONS, PolicyConfig, one_of
from hybridflow.algorithms.policy_gradient import PolicyGradient
from hybridflow.core.config.validators import at_least, non_negative


@attrs.frozen
class RLOOConfig(PolicyConfig):
    """REINFORCE leave-one-out."""

    group_size: int = attrs.field(default=4, validator=at_least(2))
    """Responses per prompt, k in the paper."""
    how: str = attrs.field(default="seq-mean-token-sum", validator=AGGREGATIONS)
    """A response is one action: its tokens' losses add up (the paper's); or another."""
    kl_coef: float = attrs.field(default=0.05, validator=non_negative)
    """beta: weight of the response's KL to the reference; 0 needs no reference."""
    kl_in: str = attrs.field(default="reward", validator=one_of(("reward", "loss")))
    """Where that KL is paid: in the response's reward (the paper's), or as a term of the loss."""
    kl_kind: str = attrs.field(default="k1", validator=one_of(("k1", "abs", "k2", "k3")))
    """The estimator of that KL; k1 in the reward only."""


class RLOO(PolicyGradient):
    """Advantage of every token: the response's reward, its KL paid, less the mean of the others."""

    Config = RLOOConfig

    def step(self, ctx) -> None:
        batch = self.sample(ctx, ctx.prompts(self.config.prompts_per_step))
        self.improve(ctx, batch, ctx.compute(self.advantages, batch))

    def advantages(self, scores, group, loss_mask, old_logprobs=None, ref_logprobs=None):
        penalty, figures = self.penalty(loss_mask, old_logprobs, ref_logprobs)
        advantages = F.leave_one_out(scores - penalty.sum(1), group)
        return {"advantages": advantages[:, None] * loss_mask, **figures}
