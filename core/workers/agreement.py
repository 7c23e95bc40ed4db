"""Compares the logprobs of rollout engine and trainer, before the optimizer steps.

For tokens that the present weights generated, an update has the logprobs of both. One reduction
gives the mean of their differences, the same on every rank. Tokens of earlier weights are not
compared; all mini-batches of a step but the first have only such tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from hybridflow.core.contracts.worker import EVERY_AXIS, RankContext
from hybridflow.core.values.metrics import Metrics
from hybridflow.core.workers.gradients import MISMATCH_MEAN, LossPart


def disagreement(
    parts: Sequence[LossPart],
    metrics: Metrics,
    context: RankContext,
    limit: float,
    just_synced: bool,
) -> str | None:
    """Return the problem with the engine's logprobs, the same on every rank; None if there is none.

    metrics: those of the losses on this rank. limit: nats; inf switches the check off.
    just_synced: the engines have the weights that are to be updated, and generate nothing ahead, so
    that some tokens must be of these. A collective call if a part has the columns and outputs to
    compare.
    """
    compared = [part for part in parts if part.compared]
    if limit == inf or not compared:
        return None

    # Ranks of one replica count the same rows, which does not change the mean.
    own = metrics.means.get(MISMATCH_MEAN, (0.0, 0.0))
    total, count = context.sum(own, EVERY_AXIS)
    if count:
        # `<=`, because comparisons with NaN are false.
        if total / count <= limit:
            return None
        return (
            "logprobs of the rollout engine and of the trainer, of the same tokens and weights, "
            f"differ by {total / count:.3g} nats on average, more than run.mismatch_stop = "
            f"{limit:g}"
        )
    if just_synced and any(part.total.tokens for part in compared):
        return (
            "none of the tokens were made by the present weights, which the rollout engine has: "
            "run.max_staleness is 0, so train on what was generated since the last update"
        )
    return None
