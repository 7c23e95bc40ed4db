"""Data source "jsonl": one JSON object per line, also gzipped."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

from hybridflow.backends.data.files import data_file
from hybridflow.core.contracts.data_source import DataConfig, DataSource
from hybridflow.core.errors import DataError
from hybridflow.core.values.text import parse_json, shorten

ENDINGS = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")


class JsonlSource(DataSource):
    """The lines of a .jsonl or .jsonl.gz file (UTF-8), read into memory.

    Blank lines are skipped. There are no options.
    """

    def __init__(self, config: DataConfig):
        super().__init__(config)
        self.read_options()
        path = data_file(
            config,
            ENDINGS,
            'for .parquet set data.source = "parquet", for a folder of the datasets library '
            '"datasets"',
        )

        self._rows = _read(path)
        if not self._rows:
            raise DataError(
                f"data.path: {str(path)!r} has only blank lines; "
                "give a file with one JSON object per line"
            )

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return dict(self._rows[i])  # a copy: callers may change their row


def _read(path: Path) -> list[dict[str, Any]]:
    """Return all rows of a file. Raises DataError that names the line."""
    rows = []
    number = 0
    compressed = path.name.lower().endswith(".gz")
    try:
        with gzip.open(path, "rb") if compressed else path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue

                # There may be a byte order mark before the first line.
                encoding = "utf-8-sig" if number == 1 else "utf-8"
                rows.append(_parse(line.decode(encoding), f"{path}, line {number}"))

    # The first is a line's own fault, the second one of the disk or of a cut gzip file.
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}, line {number}: not UTF-8 ({error}); convert the file to UTF-8"
        ) from error
    except (OSError, EOFError) as error:
        raise DataError(
            f"{path} cannot be read after line {number}: {error}; is it complete?"
        ) from error
    return rows


def _parse(line: str, where: str) -> dict[str, Any]:
    """Return the row of a line; `where` names the line in messages."""
    try:
        row = parse_json(line)
    except ValueError as error:
        raise DataError(f"{where}: not JSON ({error}): {shorten(line.strip())}") from error

    if not isinstance(row, dict):
        raise DataError(f"{where}: must be a JSON object, {{...}}; got {shorten(line.strip())}")
    return row
