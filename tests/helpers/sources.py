"""What the tests of data sources share: a source of given rows, and small tokenizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hybridflow.backends.tokenizers.small import char_tokenizer, train_tokenizer
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


DIGITS = "0123456789+="
TEXTS = [
    "Natalia sold 48/2 = 24 clips in May.\n\nIt's 1,000!",
    "Weng earns $12 an hour; she'd worked 50 minutes.\n",
] * 20


def char(characters=DIGITS):
    return char_tokenizer(characters)


def bpe(vocab_size=320):
    return train_tokenizer("bpe", vocab_size, lambda: TEXTS)


class ListSource(DataSource):
    """Counts in `reads` how often a row was asked for."""

    def __init__(self, config: DataConfig, rows: list[Any]):
        super().__init__(config)
        self.rows = rows
        self.reads = 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Any:
        self.reads += 1
        return self.rows[i]


def sums(count: int) -> list[dict[str, Any]]:
    """0+7=, 1+7=, ..."""
    return [{"a": a, "b": 7, "text": f"{a}+7=", "answer": str(a + 7)} for a in range(count)]
