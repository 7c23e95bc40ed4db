"""What a step must come to, from the batch that its updates were made of, with loops over plain numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from helpers.batches import plain
from hybridflow.core.values.batch import Batch
from hybridflow.kit.testing import TinyRun

Rows = Sequence[Sequence[float]]


def members(values: Sequence[float], group: Sequence[int], of: int) -> list[float]:
    """The values of the group of row `of`, that row's included."""
    return [value for value, name in zip(values, group, strict=True) if name == group[of]]


def minus_mean(advantages: Rows, how: str, length: int = 1) -> float:
    """The policy loss of an update on policy, where every ratio is 1: the mean of -A."""
    sums = [-sum(row) for row in advantages]
    if how == "token-mean":
        return sum(sums) / sum(len(row) for row in advantages)
    if how == "seq-mean-token-mean":
        return sum(total / len(row) for total, row in zip(sums, advantages, strict=True)) / len(
            advantages
        )
    return sum(sums) / len(advantages) / length


def rewind(run: TinyRun) -> None:
    """Draw the training data from the beginning again."""
    state = run.session.data.state().result()
    run.session.data.set_state({**state, "train": {**state["train"], "position": 0}}).result()


class Watched:
    """Before a policy-gradient algorithm: keeps what its updates were made of, in `batch`."""

    def minibatches(self, ctx, batch):
        self.batch = batch
        return super().minibatches(ctx, batch)


def taken(algorithm, **actor) -> tuple[dict[str, float], Batch, Rows, Rows]:
    """(metrics of the loss after a step of a `Watched` algorithm, its batch, logprobs after and before the step).

    actor: settings of [actor].
    """
    with TinyRun(algorithm, {"actor": actor}) as run:
        run.step()
        batch = run.algorithm.batch
        found = run.ctx.actor.loss(batch, run.algorithm.losses()["actor"]).result()
        new = plain(run.ctx.actor.logprobs(batch)["old_logprobs"])
        old = plain(batch["old_logprobs" if "old_logprobs" in batch else "rollout_logprobs"])
        run.ctx.finish()
    return found, batch, new, old


def column(batch: Batch, name: str) -> torch.Tensor:
    """Padded, on this process."""
    found = batch[name]
    return found.padded() if found.lengths is not None else torch.as_tensor(found.values)


MASK = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 1.0]])
OLD = torch.tensor([[-1.0, -2.0, 0.0], [-1.0, -9.0, -3.0]])
REF = torch.tensor([[-1.5, -1.0, 0.0], [-2.0, -1.0, -2.0]])
"""k1 per token: 0.5, -1 and 1, (hole), -1: sums -0.5 and 0."""


def scored(algorithm, scores, group=(0, 0), **columns):
    """What the algorithm's `advantages` gives for these scores; group None: it has none."""
    if group is not None:
        columns["group"] = torch.tensor(group)
    given = {"loss_mask": MASK, "old_logprobs": OLD, "ref_logprobs": REF, **columns}
    return algorithm.advantages(scores=torch.tensor(scores), **given)


def close(found: torch.Tensor, want) -> None:
    torch.testing.assert_close(found, torch.tensor(want), atol=1e-5, rtol=1e-5)
