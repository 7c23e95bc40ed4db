"""The mathematics of the algorithms: pure functions on torch tensors, each with its source.

Shapes: B sequences, T response tokens, P pairs. `mask` [B, T] (float, bool or int; non-zero is 1)
is 1 on tokens that the policy produced; it may have holes (the output of tools). x[t] belongs to
response token t, values[t] to the state before it:

    prompt   prompt   response   tool   response
                      x[0]       x[1]   x[2]
                      mask 1     0      1

Results have the floating dtype of the tensor that they stand for (float32 for integers); half
precision is computed in float32. Inputs are never changed. B = 0, T = 0 and rows without an
unmasked token are legal. What lies under a 0 of the mask is not read. Log ratios are clamped to
[-20, 20] before exp. Rewards, advantages and weights carry no graph; losses do. Shapes that do not
fit raise ValueError, since broadcasting would silently change what is counted.
"""

from __future__ import annotations

from hybridflow.algorithms._advantages import (
    discounted_returns,
    gae,
    group_normalized,
    importance_weights,
    interpolated_logprobs,
    kl_estimate,
    leave_one_out,
    length_weighted,
    overlong_punishment,
    token_rewards,
    whiten,
    without_failed,
)
from hybridflow.algorithms._losses import (
    aggregate,
    bradley_terry_loss,
    cispo_loss,
    cost_model_loss,
    diverged,
    divergence_loss,
    dpo_loss,
    geometric_mean_loss,
    policy_ratio_loss,
    sequence_ratio,
    sequence_ratio_loss,
    soft_gate_loss,
    value_loss,
)
from hybridflow.algorithms._tensors import masked_mean
from hybridflow.algorithms.controllers import AdaptiveKL, LagrangeMultiplier

__all__ = [
    "AdaptiveKL",
    "LagrangeMultiplier",
    "aggregate",
    "bradley_terry_loss",
    "cispo_loss",
    "cost_model_loss",
    "discounted_returns",
    "diverged",
    "divergence_loss",
    "dpo_loss",
    "gae",
    "geometric_mean_loss",
    "group_normalized",
    "importance_weights",
    "interpolated_logprobs",
    "kl_estimate",
    "leave_one_out",
    "length_weighted",
    "masked_mean",
    "overlong_punishment",
    "policy_ratio_loss",
    "sequence_ratio",
    "sequence_ratio_loss",
    "soft_gate_loss",
    "token_rewards",
    "value_loss",
    "whiten",
    "without_failed",
]
