"""Sequences of rows that branch, against a brute force that follows each token back to the first one."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from hybridflow.core.values.batch import Batch
from hybridflow.core.values.branches import ALONE, BRANCHES, path, paths, sequences
from hybridflow.core.values.columns import Column, tokens


def test_the_sequences_of_a_row_by_hand():
    branches = [(3, 0), (5, 2)]  # a b c | d e after a | f g after c
    assert [one.tolist() for one in paths(branches, 7)] == [[-1, 0, 3, 4], [-1, 0, 1, 2, 5, 6]]
    assert path(branches, 1).tolist() == [-1, 0, 1]
    # A conversation of its own; another that goes on after it; and one after the prompt.
    branches = [(2, -2), (4, -1), (5, 3)]
    assert [one.tolist() for one in paths(branches, 6)] == [[-1, 0, 1], [-1, 4], [2, 3, 5]]
    assert [one.tolist() for one in paths((), 3)] == [[-1, 0, 1, 2]]
    assert [one.tolist() for one in paths((), 0)] == [[-1]]


def drawn(draws: random.Random) -> tuple[int, list[tuple[int, int]], list[int]]:
    """(length, branches, for each token the one before it)."""
    length = draws.randrange(1, 12)
    befores = [-1]
    branches = []
    for index in range(1, length):
        before = index - 1
        if draws.random() < 0.4:
            before = draws.randrange(-2, index - 1) if index > 1 or draws.random() < 0.5 else -1
            branches.append((index, before))
        befores.append(before)
    return length, branches, befores


def back(befores: list[int], index: int) -> list[int]:
    """The indices up to one, from the first."""
    if index < 0:
        return [index] if index == -1 else []
    return [*back(befores, befores[index]), index]


def test_drawn_rows_have_each_token_in_a_sequence_behind_all_that_stood_before_it():
    draws = random.Random(0)
    rows = [drawn(draws) for _ in range(300)]
    batch = Batch(
        {
            "prompt_ids": tokens([[1000 + row, 7] for row in range(300)], torch.int64),
            "response_ids": tokens(
                [
                    list(range(100 * row, 100 * row + length))
                    for row, (length, *_) in enumerate(rows)
                ]
            ),
            "loss_mask": tokens([[1] * length for length, *_ in rows], torch.uint8),
            "score": torch.arange(300.0),
            "name": [str(row) for row in range(300)],
            BRANCHES: [branches for _, branches, _ in rows],
        }
    )
    found = sequences(batch)
    assert found is not None and BRANCHES not in found.batch
    assert found.batch["name"].values == [str(row) for row in found.owners]
    assert found.batch["score"].values.tolist() == found.owners.tolist()
    counted: dict[int, int] = {}
    for owner, prompt, ids, mask in zip(
        found.owners,
        found.batch["prompt_ids"],
        found.batch["response_ids"],
        found.batch["loss_mask"],
        strict=True,
    ):
        befores = rows[owner][2]
        whole = [*prompt.tolist(), *ids.tolist()]
        for at, counts in enumerate(mask.tolist(), start=len(prompt)):
            index = whole[at] - 100 * owner
            stands = back(befores, index)
            expected = [100 * owner + one for one in stands if one >= 0]
            if stands[0] == -1:
                expected = [1000 + owner, 7, *expected]
            assert whole[: at + 1] == expected
            if counts:
                counted[whole[at]] = counted.get(whole[at], 0) + 1
    # Each token counts once; the first one of a conversation of its own has nothing before it.
    alone = {
        100 * row + start
        for row, one in enumerate(rows)
        for start, before in one[1]
        if before == -2
    }
    every = {100 * row + index for row, (length, *_) in enumerate(rows) for index in range(length)}
    assert set(counted) == every - alone and set(counted.values()) == {1}

    # Values go back to where the tokens stand.
    ids = found.batch["response_ids"]
    folded = found.fold(Column(torch.as_tensor(ids.values).double(), ids.lengths))
    expected = [0.0 if one in alone else float(one) for one in sorted(every)]
    assert torch.as_tensor(folded.values).tolist() == expected
    placed: dict[int, np.ndarray] = {}
    for number, (owner, values) in enumerate(zip(found.owners, ids, strict=True)):
        padded = np.append(values.numpy().astype(np.float32), 9e9)
        placed[owner] = found.placed(number, padded, placed.get(owner))
    assert [float(one) for row in range(300) for one in placed[row]] == expected


def test_a_value_per_sequence_is_that_of_the_rows_last_token():
    batch = Batch(
        {
            "prompt_ids": tokens([[1], [2]]),
            "response_ids": tokens([[3, 4, 5], [6, 7]]),
            BRANCHES: [[(1, ALONE), (2, 0)], []],
        }
    )
    found = sequences(batch)
    assert [row.tolist() for row in found.batch["response_ids"]] == [[], [3, 5], [6, 7]]
    assert found.fold(Column(torch.tensor([0.0, 1.0, 2.0]))).values.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("columns", [{}, {BRANCHES: [[], []]}])
def test_rows_of_one_sequence_are_left_alone(columns):
    assert sequences(Batch({"response_ids": tokens([[3], [6, 7]]), **columns})) is None
