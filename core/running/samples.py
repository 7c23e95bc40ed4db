"""Which rows of a step are recorded, and what is kept of them."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from hybridflow.core.context import GroupStepContext
from hybridflow.core.contracts.observer import SampleRow
from hybridflow.core.contracts.role import Role
from hybridflow.core.contracts.tokenizer import Tokenizer
from hybridflow.core.running.session import Session
from hybridflow.core.values.batch import Batch, View
from hybridflow.core.values.columns import Column
from hybridflow.core.workers.gradients import RECORD_ID

TEXTS = {"prompt_ids": "prompt", "response_ids": "response"}
"""Column of token ids -> what it is called as text."""
MOST_CHARACTERS = 20_000
"""An object that is longer than this, as JSON, is left out: pictures, states of worlds."""


class RowRecorder:
    """Chooses the rows of a step's first groups, all rows of each, and reads their columns.

    They are rows that a policy trained on, in the order in which they were generated; without a
    policy those of any other trained role, and without an update rows that a reward has scored.
    """

    def __init__(self, session: Session, ctx: GroupStepContext, groups: int):
        self.session = session
        self.groups = groups
        """Number of groups to record of each step."""
        roles = [handle.role for handle in ctx.roles.values() if handle.role.trained]
        policies = [role for role in roles if role.kind == "policy"]
        self.role = next((role.name for role in (*policies, *roles)), None)
        """The role whose rows are recorded."""
        self._pieces: dict[int, str] = {}
        """Token id -> its text, by itself."""
        self.clear()

    def fresh(self) -> RowRecorder:
        """Return a recorder for another step."""
        recorder = copy.copy(self)
        recorder.clear()
        return recorder

    def clear(self) -> None:
        """Forget the rows of the step."""
        self._chosen: np.ndarray | None = None
        self._seen: set[int] = set()
        self._parts: list[Batch] = []
        self._scored: tuple[Batch, Batch] | None = None

    def scored(self, batch: Batch, scores: Batch) -> None:
        """Keep the rows that were scored first in this step, for a step without an update."""
        if self._scored is None and self.groups:
            self._scored = (batch, scores)

    def mark(self, role: Role, batch: Batch) -> Batch:
        """Return a mini-batch whose rows of chosen groups are numbered, if they are new."""
        if role.name != self.role or not self.groups:
            return batch
        # Nothing is recorded of what could only be told by waiting for the step's turn.
        if not _can_be_recorded(batch, waits=not self.session.outbox.holds):
            return batch
        traffic = self.session.runtime.traffic
        before = traffic.fetched
        rows = self._rows(batch)
        traffic.fetched = before  # what is fetched for records is no traffic of the algorithm's
        if not len(rows):
            return batch

        numbers = torch.full((batch.rows,), -1, dtype=torch.int32)
        first = sum(part.rows for part in self._parts)
        numbers[torch.from_numpy(rows)] = torch.arange(first, first + len(rows), dtype=torch.int32)
        self._parts.append(batch.take(rows))
        return batch.with_columns(**{RECORD_ID: numbers})

    def _rows(self, batch: Batch) -> np.ndarray:
        """Return the numbers of the rows of chosen groups that were not seen in this step."""
        groups = _numbers(_known(batch, "group"))
        if self._chosen is None:
            _, first = np.unique(groups, return_index=True)
            self._chosen = groups[np.sort(first)[: self.groups]]
        rows = np.flatnonzero(np.isin(groups, self._chosen))

        # An epoch shows the rows of the one before; rows that were not generated have no number.
        keys = _numbers(_known(batch, "sample_id") or _known(batch, "group"))
        new = [row for row in rows if int(keys[row]) not in self._seen]
        self._seen.update(int(keys[row]) for row in new)
        return np.array(new, dtype=np.int64)

    def take(self, step: int, recorded: Mapping[str, Mapping[int, np.ndarray]]) -> list[SampleRow]:
        """Return the rows of the step that has ended, and begin anew.

        recorded: `Metrics.recorded` of the step, by which the trainer's logprobs come.
        """
        parts, scored, chosen = self._parts, self._scored, self._chosen
        self.clear()
        rows: list[SampleRow] = []
        if parts:
            for part in parts:
                rows += self.read(part, step, "train")
            for name, of_rows in recorded.items():
                for number, values in of_rows.items():
                    # `role/logprobs` of the role that trains on them
                    rows[number].setdefault(name.rpartition("/")[2], values)
            rows.sort(key=lambda row: row.get("sample_id", 0))
        elif scored is not None and chosen is None and _can_be_recorded(scored[0]):
            batch = scored[0].join(scored[1])
            rows = self.read(batch.take(self._rows(batch)), step, "train")
            self.clear()
        return rows

    def read(self, batch: Batch, step: int, data: str) -> list[SampleRow]:
        """Return rows of a batch with all of their columns, as `data` of a step."""
        rows: list[SampleRow] = [{"step": step, "data": data} for _ in range(batch.rows)]
        tokenizer = self.session.prepared.tokenizer
        for name in batch.names:
            column = batch[name]
            for row, value in zip(rows, _values(column), strict=True):
                if value is None:
                    continue
                row[name] = value
                if name in TEXTS:
                    row[TEXTS[name]] = tokenizer.decode(value)
                    row[f"{TEXTS[name]}_tokens"] = [self._piece(tokenizer, id) for id in value]
                if name == "response_ids":
                    row["tokens"] = len(value)
        return rows

    def _piece(self, tokenizer: Tokenizer, token: int) -> str:
        if token not in self._pieces:
            self._pieces[token] = tokenizer.decode([token], skip_special=False)
        return self._pieces[token]


def _can_be_recorded(batch: Batch, waits: bool = True) -> bool:
    """Return whether the batch has what a recorded row needs; waits: to find out, if need be."""
    return all(
        _home(batch, name) is not None or (waits and name in batch)
        for name in ("prompt_ids", "response_ids", "group")
    )


def _home(batch: Batch, name: str) -> View | None:
    """Return the last view that is known to have a column.

    Results whose names are not known yet, `compute`'s, are not waited for where an earlier view has
    the column: recording must not hold up a step.
    """
    views = (view for view in reversed(batch.views) if name in (view.known_names() or ()))
    return next(views, None)


def _known(batch: Batch, name: str) -> Column | None:
    if (home := _home(batch, name)) is not None:
        return home.read(name)
    if name not in batch:
        return None
    return batch[name]


def _numbers(column: Column | None) -> np.ndarray:
    assert column is not None
    return np.asarray(torch.as_tensor(column.values))


def _values(column: Column) -> list[Any]:
    """Return the value to record of each row of a column; None: nothing.

    Tensors with more than a value per token or row are left out.
    """
    if column.kind == "object":
        return [_text(value) for value in column.values]
    assert isinstance(column.values, torch.Tensor)
    if column.values.dim() > 1:
        return [None] * column.rows
    values = column.values
    if values.dtype == torch.int64:  # ids, versions
        values = values.int()
    elif values.is_floating_point():
        values = values.float()
    array = values.numpy()
    if column.kind == "row":
        return array.tolist()
    assert column.lengths is not None
    return np.split(array, np.cumsum(column.lengths)[:-1])


def _text(value: Any) -> str | None:
    """Return text as it is, and other objects as JSON."""
    if value is None or isinstance(value, str):
        return value
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= MOST_CHARACTERS else None
