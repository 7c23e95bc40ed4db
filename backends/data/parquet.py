"""Data source "parquet": a Parquet file, or a folder of them."""

from __future__ import annotations

from typing import Any

from hybridflow.backends.data.files import data_file, data_path
from hybridflow.core.contracts.data_source import DataConfig, DataSource
from hybridflow.core.errors import DataError


class ParquetSource(DataSource):
    """Reads a .parquet file, or all of a folder's in the order of their names, into memory. No options."""

    def __init__(self, config: DataConfig):
        super().__init__(config)
        self.read_options()
        import pyarrow
        import pyarrow.parquet

        path = data_path(config)
        if path.is_dir():
            files = sorted(path.glob("*.parquet"))
            if not files:
                raise DataError(
                    f'data.path: the folder {str(path)!r} has no *.parquet; set data.source = "datasets" if the '
                    "datasets library saved it"
                )
        else:
            files = [data_file(config, (".parquet",), 'for .jsonl set data.source = "jsonl"')]
        tables = []
        for file in files:
            try:
                tables.append(pyarrow.parquet.read_table(file))
            except (pyarrow.ArrowException, OSError) as error:
                raise DataError(
                    f"{file} is not a readable Parquet file: {error}; is it complete?"
                ) from error
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
        return self._table.slice(i, 1).to_pylist()[0]
