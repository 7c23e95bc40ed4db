"""Scored responses on disk, one JSON line each, which an evaluation goes on from.

Rows come in chunks: a chunk's greedy responses, then its sampled ones. A chunk that a killed
evaluation left incomplete is generated again, so that the file equals that of an evaluation without
interruption.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from hybridflow.core.contracts.reward import RewardSample


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
