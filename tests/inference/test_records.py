"""Records on disk: whole chunks stay, and what a kill has left of one goes."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
from helpers.recorded import made_run, row_of

from hybridflow.core.errors import ConfigError
from hybridflow.inference.records import (
    Record,
    append_records,
    cut_to_chunks,
    of_run,
    read_records,
)

RECORD = Record(0, None, "1+1=", "2é", [5, 6], 1.0, "stop", "2", {"answer": "2"})


def test_records_are_read_as_they_were_written(tmp_path):
    file = tmp_path / "sums.jsonl"
    records = [attrs.evolve(RECORD, row=row, sample=row) for row in range(3)]
    append_records(file, records[:2])
    append_records(file, records[2:])
    read = read_records(file)
    assert [attrs.asdict(one) for one in read] == [attrs.asdict(one) for one in records]
    sample = read[0].to_sample()
    assert (sample.prompt, sample.response, sample.answer) == ("1+1=", "2é", "2")
    assert sample.response_ids.tolist() == [5, 6] and sample.response_ids.dtype == np.int64


def test_only_a_line_feed_ends_a_line(tmp_path):
    file = tmp_path / "sums.jsonl"
    text = "a\u2028b\u2029c\u0085d\x0be\r\nf\x1c"
    append_records(file, [attrs.evolve(RECORD, response=text), RECORD])
    assert [record.response for record in read_records(file)] == [text, RECORD.response]
    assert cut_to_chunks(file, [1, 1]) == 2


@pytest.mark.parametrize("cut", [0, 1, 30, 200, 400, 620, 10_000])
def test_what_is_no_whole_chunk_goes(tmp_path, cut):
    file = tmp_path / "sums.jsonl"
    append_records(file, [attrs.evolve(RECORD, row=row) for row in range(5)])
    whole = file.read_bytes()
    line = len(whole) // 5
    file.write_bytes(whole[:cut])

    # Chunks of two lines, the last of one
    chunks = cut_to_chunks(file, [2, 2, 1])
    lines = min(cut, len(whole)) // line
    assert chunks == (3 if lines == 5 else lines // 2)
    assert file.read_bytes() == whole[: [0, 2, 4, 5][chunks] * line]


def test_nothing_is_there_at_first(tmp_path):
    assert cut_to_chunks(tmp_path / "none.jsonl", [2]) == 0


def test_the_samples_of_a_run_are_records_of_training_and_of_each_validation(tmp_path):
    rows = [row_of(step, at) for step in (1, 2) for at in range(8)]
    held_out = [row_of(2, at, data="validation", finish_reason="length") for at in range(2)]
    run = made_run(tmp_path / "run", rows=[*rows, *held_out])
    found = of_run(run)
    assert {name: len(records) for name, records in found.items()} == {
        "train": 16,
        "validation-step-2": 2,
    }
    # Rows of a group are numbered; greedy responses are no samples.
    assert [(one.row, one.sample) for one in found["train"][:5]] == [
        *((100, at) for at in range(4)),
        (101, 0),
    ]
    first = found["validation-step-2"][0]
    assert (first.sample, first.finish_reason, first.meta) == (None, "length", {"answer": "a0"})
    assert first.response == rows[8]["response"] and first.prompt == "p4"
    assert first.to_sample().response_ids.tolist() == rows[8]["response_ids"].tolist()

    empty = made_run(tmp_path / "empty", rows=[])
    with pytest.raises(ConfigError, match="has no recorded samples"):
        of_run(empty)
