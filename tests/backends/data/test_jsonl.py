"""The source of JSON lines reads what it should and says what is wrong with the rest."""

from __future__ import annotations

import gzip
import json

import pytest
from helpers.sources import ROWS, check_refuses_wrong_paths, config, read

from hybridflow.backends.data.jsonl import JsonlSource
from hybridflow.core.errors import ConfigError, DataError


def test_plain_and_gzipped_files_are_read_and_blank_lines_skipped(tmp_path):
    text = "\ufeff" + "\n\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS) + "\n\n"
    (tmp_path / "a.jsonl").write_text(text, encoding="utf-8")
    with gzip.open(tmp_path / "a.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write(text)
    assert read(JsonlSource(config("jsonl", tmp_path / "a.jsonl"))) == ROWS
    assert read(JsonlSource(config("jsonl", tmp_path / "a.jsonl.gz"))) == ROWS


def test_a_row_that_is_changed_stays_as_it_was_in_the_source(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"n": 4}\n')
    source = JsonlSource(config("jsonl", tmp_path / "a.jsonl"))
    source[0]["n"] = 5
    assert source[0] == {"n": 4}


@pytest.mark.parametrize(
    "content, words",
    [
        (b'{"a": 1}\n\n{"a": \n', r"a\.jsonl, line 3: not JSON"),
        (b'{"a": 1}\n[1]\n', r"a\.jsonl, line 2: must be a JSON object.*\[1\]"),
        (b'{"a": 1}\n{"a": "\xff"}\n', r"a\.jsonl, line 2: not UTF-8"),
        (b"", "is empty"),
        (b"\n \n", "only blank lines"),
    ],
)
def test_the_file_and_line_that_cannot_be_read_are_named(tmp_path, content, words):
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=words):
        JsonlSource(config("jsonl", tmp_path / "a.jsonl"))


def test_a_gzip_file_that_is_cut_is_named(tmp_path):
    whole = gzip.compress(b'{"a": 1}\n' * 1000)
    (tmp_path / "a.jsonl.gz").write_bytes(whole[:-20])
    with pytest.raises(DataError, match=r"a\.jsonl\.gz cannot be read after line \d+.*complete"):
        JsonlSource(config("jsonl", tmp_path / "a.jsonl.gz"))
    (tmp_path / "b.jsonl.gz").write_bytes(b'{"a": 1}\n')
    with pytest.raises(DataError, match=r"b\.jsonl\.gz cannot be read"):
        JsonlSource(config("jsonl", tmp_path / "b.jsonl.gz"))


def test_a_path_that_is_missing_wrong_or_empty_says_what_to_do(tmp_path):
    check_refuses_wrong_paths(JsonlSource, "jsonl", ".jsonl", tmp_path)


def test_folders_and_unknown_options_are_refused(tmp_path):
    with pytest.raises(DataError, match="is a folder"):
        JsonlSource(config("jsonl", tmp_path))
    with pytest.raises(ConfigError, match=r"no option 'columns' \(options: none\)"):
        JsonlSource(config("jsonl", tmp_path, columns="a"))
