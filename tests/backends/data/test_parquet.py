"""The source of Parquet files reads files and folders, and names those that it cannot read."""

from __future__ import annotations

import pytest
from helpers.sources import ROWS, check_refuses_wrong_paths, config, read

from hybridflow.backends.data.parquet import ParquetSource
from hybridflow.core.errors import DataError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def test_a_file_and_a_folder_are_read_in_the_order_of_names(tmp_path):
    schema = pa.schema({"prompt": "string", "n": "int64"})
    for name, row in zip(("b", "a"), ROWS, strict=True):
        table = pa.Table.from_pylist([row], schema=schema)
        pq.write_table(table, tmp_path / f"{name}.parquet")
    assert read(ParquetSource(config("parquet", tmp_path / "b.parquet"))) == ROWS[:1]
    assert read(ParquetSource(config("parquet", tmp_path))) == ROWS[::-1]


def test_files_that_are_broken_empty_or_different_are_named(tmp_path):
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and nothing else")
    with pytest.raises(DataError, match=r"broken\.parquet is not a readable Parquet file"):
        ParquetSource(config("parquet", tmp_path / "broken.parquet"))
    (tmp_path / "broken.parquet").unlink()
    with pytest.raises(DataError, match=r"has no \*\.parquet"):
        ParquetSource(config("parquet", tmp_path))
    pq.write_table(pa.table({"a": pa.array([], "int64")}), tmp_path / "none.parquet")
    with pytest.raises(DataError, match="has no rows"):
        ParquetSource(config("parquet", tmp_path / "none.parquet"))
    pq.write_table(pa.table({"b": [1]}), tmp_path / "other.parquet")
    with pytest.raises(DataError, match="different columns"):
        ParquetSource(config("parquet", tmp_path))


def test_a_path_that_is_missing_wrong_or_empty_says_what_to_do(tmp_path):
    check_refuses_wrong_paths(ParquetSource, "parquet", ".parquet", tmp_path)
