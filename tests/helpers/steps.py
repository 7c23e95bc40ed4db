"""What a step of a run must come to, from the batch that its updates were made of, with loops over plain numbers."""

from __future__ import annotations

from collections.abc import Sequence

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
    state = run.session.tasks.state().result()
    run.session.tasks.set_state({**state, "train": {**state["train"], "position": 0}}).result()
