"""What the tests of data sources share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hybridflow.core.contracts.data_source import DataConfig, DataSource
from hybridflow.core.errors import DataError

ROWS = [{"prompt": "2+2=", "n": 4}, {"prompt": "größer ’ 日本", "n": None}]


def config(source: str, path: Path | None = None, **options: Any) -> DataConfig:
    return DataConfig(source=source, path=None if path is None else str(path), options=options)


def read(source: DataSource) -> list[dict[str, Any]]:
    return [source[i] for i in range(len(source))]


def check_refuses_wrong_paths(kind: type[DataSource], name: str, ending: str, folder: Path) -> None:
    """A source of files says what to do about a path that is missing, wrong or empty."""
    (folder / "data.csv").write_text("a,b\n")
    (folder / f"empty{ending}").write_text("")
    for path, words in [
        (None, "set data.path"),
        (folder / "no" / f"x{ending}", rf"there is no .*x{ending}.* has empty{ending}, data\.csv"),
        (folder / "data.csv", rf"does not end in {ending}.*data\.source = "),
        (folder / f"empty{ending}", "is empty"),
    ]:
        with pytest.raises(DataError, match=words):
            kind(config(name, path))
