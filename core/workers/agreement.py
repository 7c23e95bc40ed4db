"""Whether a rollout engine says what its trainer would: asked before the optimizer steps.

Of the tokens that the present weights made, an update has both logprobs. One reduction gives the
mean of their differences, the same on every rank. Tokens of earlier weights are not compared: of
the mini-batches of a step only the first has others.
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
    """Return what is wrong with the engine's logprobs, the same on every rank; None if nothing is.

    metrics: those of the losses on this rank. limit: nats; inf switches the check off.
    just_synced: the engines have the weights that are to be updated, so that tokens of theirs are
    expected. A collective call where a loss has what it takes.
    """
    compared = [part for part in parts if part.compared]
    if limit == inf or not compared:
        return None

    # Ranks that compute the same rows count them alike, which leaves the mean as it is.
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
