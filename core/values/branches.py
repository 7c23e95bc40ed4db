"""Rows whose tokens are several sequences: episodes in which a conversation branches.

A row holds each token once, in the order in which they were written. Its branches say where a
sequence goes on elsewhere than after the token before:

    index      0  1  2  3  4  5  6
    token      a  b  c  d  e  f  g         branches [(3, 0), (5, 2)]

    a d e          d goes on after a
    a b c f g      f goes on after c; a counts above

A model computes sequences, each token of a row counting in one of them; controllers, rewards and
whatever else reads a batch have rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import torch

from hybridflow.core.values.batch import Batch
from hybridflow.core.values.columns import Column, tokens

BRANCHES = "branches"
"""The column: per row a list of [index of the first token, index of the token before it]; none for
a row that is one sequence."""
AFTER_PROMPT, ALONE = -1, -2
"""In the place of a token before: the row's prompt, or nothing, for a conversation of its own."""


def path(branches: Sequence[Sequence[int]], last: int) -> np.ndarray:
    """Return the indices of a sequence's tokens, int64, whose last one is given.

    They begin with AFTER_PROMPT for one after the row's prompt.
    """
    parts: list[np.ndarray] = []
    for start, before in [*sorted(map(tuple, branches), reverse=True), (0, AFTER_PROMPT)]:
        if last >= start:
            parts.append(np.arange(start, last + 1, dtype=np.int64))
            last = before
    if last == AFTER_PROMPT:
        parts.append(np.array([AFTER_PROMPT], np.int64))
    return np.concatenate([np.zeros(0, np.int64), *reversed(parts)])


def paths(branches: Sequence[Sequence[int]], length: int) -> list[np.ndarray]:
    """Return the sequences of a row of `length` tokens, as `path` does, by their last tokens."""
    starts = [start for start, _ in branches]
    ends = {length - 1, *(start - 1 for start in starts)}
    return [path(branches, last) for last in sorted(ends - {before for _, before in branches})]


class Place:
    """Where the next turn of a row is made, while the row is written."""

    def __init__(self) -> None:
        self.branches: list[tuple[int, int]] = []
        """Those of the row so far, as in the column."""
        self.context = path((), AFTER_PROMPT)
        """The tokens before the turn, as `path` gives them."""

    def move(self, length: int, added: int, after: int | None) -> None:
        """Go on after a token, behind `added` new ones.

        length: the row's tokens without them; after: as in Answer.after, None for the last one.
        """
        before = length - 1
        if after is not None and after != before:
            before = after
            self.branches.append((length, before))
        self.context = path(self.branches, length + added - 1 if added else before)

    def split(self, prompt: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (the prompt of the turn's request, the indices of the tokens behind it).

        prompt: the row's; a conversation of its own has its first token in the place of one.
        """
        first, rest = self.context[:1], self.context[1:]
        return (prompt if first[0] == AFTER_PROMPT else ids[first]), rest


@attrs.frozen(eq=False)
class Sequences:
    """The sequences of a batch whose rows branch."""

    batch: Batch
    """A row per sequence. Its response has all tokens but the prompt's, those that count elsewhere
    with loss_mask 0."""
    owners: np.ndarray
    """The row of each sequence, int64 [sequences]."""
    at: np.ndarray
    """The place of each response token of the sequences in the rows' tokens, int64."""
    counts: np.ndarray
    """Whether it counts there, bool; each token of the rows does in one sequence at most."""
    lengths: np.ndarray
    """The number of response tokens of each row, int64 [rows]."""

    def placed(self, sequence: int, values: np.ndarray, row: np.ndarray | None) -> np.ndarray:
        """Return the values of a row, with those of the tokens that count in one sequence.

        row: with those of others; None: there are none yet.
        """
        start = int(self._starts[sequence])
        tokens_of = slice(start, start + int(self._sizes[sequence]))
        owner = self.owners[sequence]
        if row is None:
            row = np.zeros(int(self.lengths[owner]), values.dtype)
        first = int(self.lengths[:owner].sum())
        counts = self.counts[tokens_of]
        row[self.at[tokens_of][counts] - first] = values[: len(counts)][counts]
        return row

    @property
    def _sizes(self) -> np.ndarray:
        sizes = self.batch["response_ids"].lengths
        assert sizes is not None
        return sizes

    @property
    def _starts(self) -> np.ndarray:
        return np.asarray(np.cumsum(self._sizes) - self._sizes)

    def fold(self, column: Column) -> Column:
        """Return values of the sequences as values of the rows.

        A token of which no sequence has a value, the first one of a conversation of its own, gets
        0; a value per sequence is that of the row's last one to be written.
        """
        values = torch.as_tensor(column.values)
        if column.lengths is None:
            last = np.flatnonzero(np.append(np.diff(self.owners) != 0, True))
            return Column(values[torch.from_numpy(last)])
        made = values.new_zeros(int(self.lengths.sum()), *values.shape[1:])
        made[torch.from_numpy(self.at[self.counts])] = values[torch.from_numpy(self.counts)]
        return Column(made, self.lengths)


def sequences(batch: Batch) -> Sequences | None:
    """Return a batch's sequences; None where each row is one."""
    if BRANCHES not in batch or not any(batch[BRANCHES].values):
        return None
    ids = batch["response_ids"]
    assert ids.lengths is not None
    firsts = np.cumsum(ids.lengths) - ids.lengths
    values = torch.as_tensor(ids.values).numpy()

    owners, prompts, responses, counted = [], [], [], []
    for row, (prompt, branches, length) in enumerate(
        zip(batch["prompt_ids"], batch[BRANCHES].values, ids.lengths.tolist(), strict=True)
    ):
        seen = np.zeros(length, bool)
        for indices in paths(branches, length):
            # A conversation of its own has its first token in the place of a prompt.
            alone = indices[0] != AFTER_PROMPT
            prompts.append(values[firsts[row] + indices[:1]] if alone else prompt.numpy())
            response = indices[1:]
            owners.append(row)
            responses.append(firsts[row] + response)
            counted.append(~seen[response])
            seen[response] = True

    at = np.concatenate(responses)
    counts = np.concatenate(counted)
    lengths = np.array([len(response) for response in responses])
    columns: dict[str, Column] = {}
    for name in [name for name in batch if name != BRANCHES]:
        column = batch[name]
        if column.lengths is not None and np.array_equal(column.lengths, ids.lengths):
            columns[name] = Column(torch.as_tensor(column.values)[torch.from_numpy(at)], lengths)
        else:
            columns[name] = column.take(np.array(owners))
    columns["prompt_ids"] = tokens(prompts, torch.int64)
    if "loss_mask" in columns:
        mask = torch.as_tensor(columns["loss_mask"].values)
        columns["loss_mask"] = Column(mask * torch.from_numpy(counts).to(mask.dtype), lengths)
    return Sequences(Batch(columns), np.array(owners), at, counts, ids.lengths)
