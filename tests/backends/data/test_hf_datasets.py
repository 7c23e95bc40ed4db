"""The source of folders that the datasets library saved."""

from __future__ import annotations

import pytest
from helpers.sources import ROWS, config, read

from hybridflow.backends.data.hf_datasets import DatasetsSource
from hybridflow.core.errors import DataError

datasets = pytest.importorskip("datasets")


def test_a_saved_folder_and_one_of_its_splits_are_read(tmp_path):
    data = datasets.Dataset.from_list(ROWS)
    data.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=data, test=data.select([1])).save_to_disk(tmp_path / "two")
    assert read(DatasetsSource(config("datasets", tmp_path / "one"))) == ROWS
    assert read(DatasetsSource(config("datasets", tmp_path / "two", split="test"))) == ROWS[1:]
    with pytest.raises(DataError, match=r"has the splits train, test; set data.options.split"):
        DatasetsSource(config("datasets", tmp_path / "two"))
    words = r"no split 'tests'; did you mean 'test'\? \(splits: train, test\)"
    with pytest.raises(DataError, match=words):
        DatasetsSource(config("datasets", tmp_path / "two", split="tests"))
    with pytest.raises(DataError, match="has no splits; remove the option"):
        DatasetsSource(config("datasets", tmp_path / "one", split="test"))


def test_a_folder_without_rows_is_refused(tmp_path):
    datasets.Dataset.from_list(ROWS).select([]).save_to_disk(tmp_path / "none")
    with pytest.raises(DataError, match=r"none.*at least one row"):
        DatasetsSource(config("datasets", tmp_path / "none"))


def test_what_it_reads_is_said_when_it_is_given_something_else(tmp_path):
    with pytest.raises(DataError, match=r"cannot be loaded by the datasets library.*save_to_disk"):
        DatasetsSource(config("datasets", tmp_path))
    (tmp_path / "a.jsonl").write_text("{}")
    with pytest.raises(DataError, match=r'is a file.*data\.source = "jsonl"'):
        DatasetsSource(config("datasets", tmp_path / "a.jsonl"))
