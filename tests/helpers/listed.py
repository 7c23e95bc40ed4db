"""A data source whose rows a test gives."""

from __future__ import annotations

from typing import Any

from hybridflow.core.contracts.data_source import DataConfig, DataSource


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
