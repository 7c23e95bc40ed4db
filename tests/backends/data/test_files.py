"""What is checked of a path before a source reads it."""

from __future__ import annotations

import pytest
from helpers.sources import config

from hybridflow.backends.data.files import data_file, data_path
from hybridflow.core.errors import DataError


def test_files_and_folders_that_are_there_are_given_back(tmp_path):
    assert data_path(config("datasets", tmp_path)) == tmp_path
    file = tmp_path / "Rows.JSONL.gz"
    file.write_text("x")
    assert data_file(config("jsonl", file), (".jsonl", ".jsonl.gz"), "") == file


def test_a_path_that_is_not_there_is_told_with_what_is_in_the_nearest_folder(tmp_path):
    for name in "ihgfedcba":
        (tmp_path / name).touch()
    with pytest.raises(DataError, match=r"there is no .*has a, b, c, d, e, f, g, h\)"):
        data_path(config("jsonl", tmp_path / "no" / "deeper" / "rows.jsonl"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty' has nothing\)"):
        data_path(config("jsonl", tmp_path / "empty" / "rows.jsonl"))


def test_the_source_that_needs_a_path_is_named():
    with pytest.raises(DataError, match=r"data source 'jsonl' reads from disk; set data\.path"):
        data_path(config("jsonl"))


def test_a_folder_an_other_ending_and_an_empty_file_say_where_else_to_go(tmp_path):
    (tmp_path / "rows.csv").write_text("a,b")
    (tmp_path / "rows.b").touch()
    for name, words in [
        ("", r"is a folder and source 'x' reads a file; go there"),
        ("rows.csv", r"does not end in \.a or \.b, .*source 'x' reads; go there"),
        ("rows.b", "is empty"),
    ]:
        with pytest.raises(DataError, match=words):
            data_file(config("x", tmp_path / name), (".a", ".b"), "go there")
