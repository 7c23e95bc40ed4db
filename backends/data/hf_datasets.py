"""Data source "datasets": a folder that the datasets library saved (`Dataset.save_to_disk`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hybridflow.backends.data.files import data_path
from hybridflow.core.contracts.data_source import DataConfig, DataSource
from hybridflow.core.errors import DataError
from hybridflow.core.names import did_you_mean


class DatasetsSource(DataSource):
    """The rows of a folder, which is memory-mapped and not read into memory.

    Option `split`: the name of a split; needed if the folder has several, and only then allowed.
    """

    def __init__(self, config: DataConfig):
        super().__init__(config)
        split = self.read_options(split="")["split"]
        path = data_path(config)
        if path.is_file():
            raise DataError(
                f'data.path: {str(path)!r} is a file, and source "datasets" reads a folder made by '
                'save_to_disk; set data.source = "jsonl" or "parquet" for a file'
            )

        # Imported late, so that a wrong path is reported at once.
        import datasets

        try:
            data = datasets.load_from_disk(str(path))
        except Exception as error:  # the library raises its own, pyarrow's and OSError
            raise DataError(
                f"data.path: {str(path)!r} cannot be loaded by the datasets library "
                f"({type(error).__name__}: {error}); make it with dataset.save_to_disk(...), with "
                "at least one row"
            ) from error

        # A DatasetDict maps the names of splits to Datasets; a Dataset has none.
        if isinstance(data, datasets.DatasetDict):
            data = _one_split(data, split, path)
        elif split:
            raise DataError(
                f"data.options.split is {split!r}, but {str(path)!r} has no splits; "
                "remove the option"
            )

        if len(data) == 0:
            raise DataError(
                f"data.path: {str(path)!r} has no rows; write it again or give another one"
            )
        self._data = data  # reads a row from the files when it is asked for

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return self._data[i]


def _one_split(data: Any, split: str, path: Path) -> Any:
    """Return the split of that name. Raises DataError, with the existing names."""
    names = ", ".join(data)
    if not split:
        raise DataError(
            f"data.path: {str(path)!r} has the splits {names}; set data.options.split to one"
        )

    if split not in data:
        raise DataError(
            f"data.options.split: {str(path)!r} has no split {split!r}{did_you_mean(split, data)} "
            f"(splits: {names})"
        )
    return data[split]
