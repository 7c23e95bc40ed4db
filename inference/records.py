"""Scored responses on disk, one JSON line each, which an evaluation goes on from.

Rows come in chunks: a chunk's greedy responses, then its sampled ones. A chunk that a killed
evaluation left incomplete is generated again, so that the file equals that of an evaluation without
interruption.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from hybridflow.core.contracts.reward import RewardSample
from hybridflow.core.errors import ConfigError
from hybridflow.kit.recording import SAMPLES, read_rows


@attrs.frozen(eq=False)
class Record:
    """A scored response."""

    row: int
    """Number of the data set's row."""
    sample: int | None
    """Number of the row's sampled response, from 0; None for the greedy one."""
    prompt: str
    response: str
    """The text as the reward gets it: without special tokens."""
    response_ids: list[int]
    score: float
    finish_reason: str
    answer: str | None
    """The answer that the reward extracts from the response; None where it extracts none."""
    meta: dict[str, Any]
    """The row's fields."""

    def to_sample(self) -> RewardSample:
        """Return the record as the input of a reward."""
        ids = np.array(self.response_ids, np.int64)
        return RewardSample(self.prompt, self.response, ids, self.meta, self.finish_reason)


def read_records(path: Path) -> list[Record]:
    """Return the records of a file."""
    # Lines end with \n alone: JSON leaves other line breaks in texts as they are.
    with open(path, encoding="utf-8", newline="\n") as file:
        return [Record(**json.loads(line)) for line in file]


def of_run(run: Path) -> dict[str, list[Record]]:
    """Return the recorded samples of a run: those of all its steps, and of each validation.

    Raises ConfigError where nothing is recorded.
    """
    columns = ("step", "data", "group", "prompt", "response", "response_ids", "meta")
    sets: dict[str, list[Record]] = {}
    counts: Counter[tuple[str, int]] = Counter()
    for row in read_rows(run, SAMPLES, (*columns, "finish_reason")):
        training = row["data"] == "train"
        name = "train" if training else f"{row['data']}-step-{row['step']}"
        group = int(row.get("group", 0))
        number = counts[name, group]
        counts[name, group] += 1
        record = Record(
            row=group,
            sample=number if training else None,
            prompt=row.get("prompt", ""),
            response=row.get("response", ""),
            response_ids=list(row["response_ids"]),
            score=math.nan,
            finish_reason=row.get("finish_reason", ""),
            answer=None,
            meta=json.loads(row.get("meta") or "{}"),
        )
        sets.setdefault(name, []).append(record)
    if not sets:
        raise ConfigError(f"{run}: has no recorded samples (run.samples of its config is 0?)")
    return sets


def append_records(path: Path, records: Sequence[Record]) -> None:
    """Append records to a file, and sync it to the disk."""
    fields = attrs.fields(Record)
    with open(path, "a", encoding="utf-8", newline="\n") as file:
        for record in records:
            line = {field.name: getattr(record, field.name) for field in fields}
            file.write(json.dumps(line, ensure_ascii=False, default=str) + "\n")
        file.flush()
        os.fsync(file.fileno())


def cut_to_chunks(path: Path, chunk_lines: Sequence[int]) -> int:
    """Cut an incomplete last chunk off a file; return the number of complete chunks.

    chunk_lines: the number of lines of each chunk.
    """
    if not path.is_file():
        return 0
    with open(path, "rb+") as file:
        end = 0
        chunks = 0
        for lines in chunk_lines:
            for _ in range(lines):
                line = file.readline()
                if not line.endswith(b"\n"):
                    file.truncate(end)
                    return chunks
            end = file.tell()
            chunks += 1
        file.truncate(end)
    return chunks
