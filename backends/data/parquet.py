"""Data source "parquet": a Parquet file, or a folder of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hybridflow.backends.data.files import data_file, data_path
from hybridflow.core.contracts.data_source import DataConfig, DataSource
from hybridflow.core.errors import DataError


class ParquetSource(DataSource):
    """The rows of a .parquet file, or of all in a folder by order of their names.

    They are read into memory. There are no options.
    """

    def __init__(self, config: DataConfig):
        super().__init__(config)
        self.read_options()

        # Imported here, so that hybridflow works without the extra `data`.
        import pyarrow
        import pyarrow.parquet

        path = data_path(config)
        tables = []
        for file in _files(config, path):
            try:
                tables.append(pyarrow.parquet.read_table(file))
            except (pyarrow.ArrowException, OSError) as error:
                raise DataError(
                    f"{file} is not a readable Parquet file: {error}; is it complete?"
                ) from error

        # One table, whose rows are numbered across the files.
        try:
            self._table = pyarrow.concat_tables(tables)
        except pyarrow.ArrowInvalid as error:
            raise DataError(
                f"the files in {str(path)!r} have different columns: {error}; give one file"
            ) from error

        if self._table.num_rows == 0:
            raise DataError(
                f"data.path: {str(path)!r} has no rows; write it again or give another one"
            )

    def __len__(self) -> int:
        return self._table.num_rows

    def __getitem__(self, i: int) -> dict[str, Any]:
        # A slice copies nothing, so only this row becomes Python values.
        return self._table.slice(i, 1).to_pylist()[0]


def _files(config: DataConfig, path: Path) -> list[Path]:
    """Return the Parquet files of data.path, at least one. Raises DataError."""
    if not path.is_dir():
        return [data_file(config, (".parquet",), 'for .jsonl set data.source = "jsonl"')]

    files = sorted(path.glob("*.parquet"))
    if not files:
        raise DataError(
            f"data.path: the folder {str(path)!r} has no *.parquet; "
            'set data.source = "datasets" if the datasets library saved it'
        )
    return files
