"""Records on disk: whole chunks stay, and what a kill has left of one goes."""

from __future__ import annotations

import attrs
import numpy as np
import pytest

from hybridflow.inference.records import Record, append_records, cut_to_chunks, read_records

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
