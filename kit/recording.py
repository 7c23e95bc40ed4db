"""What a run records: tables in part files of bounded size, which grow while the run goes on.

    RUN/recording/samples-00000001.parquet     rows of steps 1 to 340
                  samples-00000341.parquet     rows of steps 341 on
                  timeline-00000001.parquet
                  every.json                   {"samples": 2, "timeline": 1}

Parts are Parquet where pyarrow is installed, else JSON lines. Each is written aside and renamed;
the last one is written anew as it grows. Where the parts of a table exceed their bound, every
second recorded step is dropped from all of them, and of the later steps as many are left out.
"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hybridflow.core.errors import ConfigError, DamagedError
from hybridflow.core.names import reason
from hybridflow.core.values.files import RECORDING
from hybridflow.core.values.sealed import PARTIAL

SAMPLES = "samples"
"""The table of recorded rows (core.contracts.observer.SampleRow)."""
TIMELINE = "timeline"
"""The table of what the processes did (core.contracts.observer.Span, and `step`)."""
MEMORY = "memory.json"
"""The file with the estimated memory of each pool's devices (core.contracts.planner.PoolMemory)."""
EVERY = "every.json"
"""The file that says which steps a table has: every so many."""
PART_BYTES = 1_000_000
"""A part with more bytes of rows (`_size`) is complete with its last step. Its rows are held until
then."""
STEP_SHARE = 8
"""A step's rows may take one in so many bytes of the bound, as they are in memory."""

Row = dict[str, Any]


def can_write_parquet() -> bool:
    """Return whether parts are Parquet here: whether pyarrow is installed."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError:
        return False
    return True


class RecordedTable:
    """Writes a table of a run. Every row has a `step`."""

    def __init__(
        self,
        run: Path,
        name: str,
        most_bytes: int,
        place: Callable[[Row], int] = lambda row: max(row["step"] - 1, 0),
    ):
        """run: the run's folder. most_bytes: of all parts together, on the disk.

        place: the number of a row's step among those that may be recorded, from 0.
        """
        self.folder = run / RECORDING
        self.name = name
        self.most_bytes = most_bytes
        self.place = place
        self.every = 1
        """Rows whose place is a multiple of this are kept."""
        self.suffix = ".parquet" if can_write_parquet() else ".jsonl"
        self._rows: list[bytes] = []
        """The rows of the last part, each list that was added pickled: as objects they take several
        times as much, which a long run would have in pieces all over its memory."""
        self._last = 0
        """The step of the last one."""
        self._file: Path | None = None
        self._held = 0
        """Bytes of these rows."""
        self._new = False
        """Whether some of them are not written yet."""

    def begin(self, step: int) -> None:
        """Begin to write after `step`, without the rows of later steps that are there."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in self.folder.glob(f"{self.name}-*{PARTIAL}"):
            path.unlink()
        self.every = _read_every(self.folder).get(self.name, 1)
        self._rows, self._file, self._held, self._new = [], None, 0, False
        for path in parts_of(self.folder, self.name):
            if _first_step(path) > step:
                path.unlink()
        if parts := parts_of(self.folder, self.name):
            last = parts[-1]
            _keep(last, lambda row: row["step"] <= step)
            # On the disk it is not larger by much, where it is not compressed.
            if last.suffix == self.suffix and last.stat().st_size < 2 * PART_BYTES:
                self._file = last
                self._hold(read_part(last))

    def add(self, rows: Sequence[Row]) -> None:
        """Add rows of one step; those of steps that are left out are not kept.

        Where they would take too much of the bound, the first ones are kept, at least one.
        """
        # A part is named by its first step, so that a step is in one part.
        if self._held > PART_BYTES and rows and rows[0]["step"] != self._last:
            self.flush()
            self._rows, self._file, self._held = [], None, 0
        kept: list[Row] = []
        size = 0
        for row in rows:
            if self.place(row) % self.every:
                continue
            size += _size(row)
            if kept and size > self.most_bytes / STEP_SHARE:
                break
            kept.append(row)
        self._hold(kept)
        self._new |= bool(kept)
        if self._held > PART_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write the rows that are not written yet."""
        if not self._new:
            return
        self._new = False
        rows = self._held_rows()
        if self._file is None:
            self._file = self.folder / f"{self.name}-{rows[0]['step']:08d}{self.suffix}"
        _write_part(self._file, rows)
        while self._nbytes() > self.most_bytes and self._thin():
            pass

    def _nbytes(self) -> int:
        return sum(path.stat().st_size for path in parts_of(self.folder, self.name))

    def _thin(self) -> bool:
        """Drop every second recorded step; return False where only one is left."""
        self.every *= 2
        _write_every(self.folder, self.name, self.every)
        steps: set[int] = set()
        for path in parts_of(self.folder, self.name):
            kept = _keep(path, self._is_kept)
            if not kept:
                path.unlink()
                self._file = None if path == self._file else self._file
            steps.update(kept)
        rows = [row for row in self._held_rows() if self._is_kept(row)]
        self._rows, self._held = [], 0
        self._hold(rows)
        return len(steps) > 1

    def _hold(self, rows: Sequence[Row]) -> None:
        if rows:
            self._rows.append(pickle.dumps(rows))
            self._held += sum(map(_size, rows))
            self._last = rows[-1]["step"]

    def _held_rows(self) -> list[Row]:
        return [row for held in self._rows for row in pickle.loads(held)]

    def _is_kept(self, row: Row) -> bool:
        return self.place(row) % self.every == 0


# --- reading ---


def parts_of(folder: Path, name: str) -> list[Path]:
    """Return the parts of a table in the order of their steps; there may be none."""
    found = [*folder.glob(f"{name}-*.parquet"), *folder.glob(f"{name}-*.jsonl")]
    return sorted(found, key=lambda path: (_first_step(path), path.suffix))


def recorded_every(run: Path, name: str) -> int:
    """Return of how many steps one is recorded."""
    return _read_every(run / RECORDING).get(name, 1)


def read_part(
    path: Path, columns: Sequence[str] | None = None, numbers: Sequence[int] | None = None
) -> list[Row]:
    """Return the rows of a part, without the columns that a row does not have.

    columns: those to read; numbers: of the rows to read; None: all. Token columns are lists. Raises
    DamagedError for a part that cannot be read, and ConfigError where pyarrow is missing.
    """
    if path.suffix == ".parquet":
        table = _read_table(path, columns)
        if numbers is not None:
            table = _take(table, numbers)
        return [
            {key: value for key, value in row.items() if value is not None}
            for row in table.to_pylist()
        ]
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    rows = []
    for number in range(len(lines)) if numbers is None else numbers:
        try:
            row = json.loads(lines[number])
        except ValueError as error:
            raise _damaged(path, error) from error
        rows.append({key: row[key] for key in columns if key in row} if columns else row)
    return rows


def read_columns(path: Path, columns: Sequence[str]) -> dict[str, list[Any]]:
    """Return columns of a part with an entry for each row, None where the row does not have it."""
    if path.suffix == ".parquet":
        table = _read_table(path, columns)
        found = {name: table.column(name).to_pylist() for name in table.column_names}
        return {name: found.get(name, [None] * table.num_rows) for name in columns}
    rows = read_part(path, columns)
    return {name: [row.get(name) for row in rows] for name in columns}


def _take(table: Any, numbers: Sequence[int]) -> Any:
    # An array, since no numbers have no type that pyarrow would take.
    return table.take(np.asarray(numbers, np.int64))


def _read_table(path: Path, columns: Sequence[str] | None) -> Any:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise ConfigError(
            f"{path}: is Parquet, which needs pyarrow: pip install 'hybridflow[data]'"
        ) from error
    try:
        there = parquet.read_schema(path).names
        names = None if columns is None else [name for name in columns if name in there]
        return parquet.read_table(path, columns=names)
    except (ArrowException, OSError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> DamagedError:
    return DamagedError(f"{path} is damaged: {reason(error)}; remove it, and the rest can be read")


def read_rows(run: Path, name: str, columns: Sequence[str] | None = None) -> Iterator[Row]:
    """Yield the recorded rows of a run's table, in the order of their steps."""
    for path in parts_of(run / RECORDING, name):
        yield from read_part(path, columns)


# --- files ---


def _first_step(path: Path) -> int:
    digits = path.stem.rpartition("-")[2]
    return int(digits) if digits.isdigit() else 0


def _keep(path: Path, is_kept: Callable[[Row], bool]) -> list[int]:
    """Write a part anew with the rows that are kept, by `step` and `data`; return their steps.

    Rows of Parquet are not read into Python, which would take seconds.
    """
    light = read_columns(path, ("step", "data"))
    rows = [{"step": step, "data": data} for step, data in zip(*light.values(), strict=True)]
    numbers = [number for number, row in enumerate(rows) if is_kept(row)]
    if path.suffix == ".parquet":
        _write_table(path, _take(_read_table(path, None), numbers))
    else:
        _write_part(path, read_part(path, numbers=numbers))
    return [rows[number]["step"] for number in numbers]


def _write_table(path: Path, table: Any) -> None:
    from pyarrow import parquet

    partial = path.with_name(f"{path.name}{PARTIAL}")
    parquet.write_table(table, partial, compression="zstd")
    os.replace(partial, path)


def _write_part(path: Path, rows: Sequence[Row]) -> None:
    """Write rows aside, and put them in the place of a part."""
    if path.suffix == ".parquet":
        import pyarrow

        names = dict.fromkeys(name for row in rows for name in row) or ["step"]
        columns = {name: [row.get(name) for row in rows] for name in names}
        arrays = {name: pyarrow.array(values) for name, values in columns.items()}
        _write_table(path, pyarrow.table(arrays))
        return
    partial = path.with_name(f"{path.name}{PARTIAL}")
    with partial.open("w", encoding="utf-8", newline="\n") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False, default=_plain) + "\n")
    os.replace(partial, path)


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else str(value)


def _size(row: Row) -> int:
    """Return about the bytes of a row: 4 for each number, and the characters of texts."""
    size = 0
    for value in row.values():
        if isinstance(value, np.ndarray):
            size += value.nbytes
        elif isinstance(value, list):
            size += 4 * len(value)
        else:
            size += len(value) if isinstance(value, str) else 8
    return size


def _read_every(folder: Path) -> dict[str, int]:
    try:
        found = json.loads((folder / EVERY).read_text())
    except (OSError, ValueError):
        return {}
    known = found.items() if isinstance(found, dict) else ()
    return {name: every for name, every in known if isinstance(every, int) and every > 0}


def _write_every(folder: Path, name: str, every: int) -> None:
    partial = folder / f"{EVERY}{PARTIAL}"
    partial.write_text(json.dumps({**_read_every(folder), name: every}) + "\n")
    os.replace(partial, folder / EVERY)
