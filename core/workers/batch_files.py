"""A batch and its metrics in one file: numpy's .npz, of which nothing is unpickled."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hybridflow.core.errors import DamagedError
from hybridflow.core.values.batch import Batch
from hybridflow.core.values.columns import Column
from hybridflow.core.values.metrics import Metrics

CONTENTS = "contents"
"""Array of the file that has, as JSON, what is no array: the columns' kinds, objects, metrics."""
NARROW = (np.int8, np.int16, np.int32)
"""Types in which whole numbers are written that fit."""


def write_batch(file: Path, batch: Batch) -> str:
    """Write the columns and metrics of a batch; return the file's SHA-256.

    Raises TypeError for a column of objects that JSON does not know.
    """
    arrays: dict[str, np.ndarray] = {}
    columns: dict[str, Any] = {}
    types: dict[str, str] = {}
    for name in batch.names:
        column = batch[name]
        columns[name] = column.values if column.kind == "object" else column.kind
        if column.kind != "object":
            values = torch.as_tensor(column.values).numpy()
            types[name] = values.dtype.name
            arrays[f"values/{name}"] = _narrowed(values)
        if column.lengths is not None:
            arrays[f"lengths/{name}"] = _narrowed(column.lengths)
    metrics = batch.metrics
    for name, values in metrics.spreads.items():
        arrays[f"spread/{name}"] = values
    contents = {
        "columns": columns,
        "types": types,
        "means": metrics.means,
        "maxima": metrics.maxima,
    }
    arrays[CONTENTS] = np.frombuffer(json.dumps(contents).encode(), np.uint8)

    stream = io.BytesIO()
    np.savez(stream, **arrays)  # type: ignore[arg-type]
    file.write_bytes(stream.getbuffer())
    return hashlib.sha256(stream.getbuffer()).hexdigest()


def _narrowed(values: np.ndarray) -> np.ndarray:
    """Return whole numbers in the smallest type that has them; others as they are."""
    if values.dtype not in (np.int32, np.int64) or not values.size:
        return values
    least, most = values.min(), values.max()
    fitting = (one for one in NARROW if np.iinfo(one).min <= least and most <= np.iinfo(one).max)
    return values.astype(next(fitting, values.dtype), copy=False)


def read_batch(file: Path, digest: str) -> Batch:
    """Return what `write_batch` was given. Raises DamagedError if the file is not as it was."""
    try:
        data = file.read_bytes()
    except OSError as error:
        raise DamagedError(f"{file} cannot be read: {error}") from error
    if hashlib.sha256(data).hexdigest() != digest:
        raise DamagedError(f"{file} is not as it was written: it has another checksum")
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            return _batch({name: arrays[name] for name in arrays.files})
    except (ValueError, KeyError, zipfile.BadZipFile) as error:
        raise DamagedError(f"{file} is not what a run writes: {error}") from error


def _batch(arrays: dict[str, np.ndarray]) -> Batch:
    contents = json.loads(arrays[CONTENTS].tobytes())
    columns: dict[str, Any] = {}
    for name, kind in contents["columns"].items():
        if isinstance(kind, list):
            columns[name] = kind
        else:
            values = arrays[f"values/{name}"].astype(contents["types"][name], copy=False)
            lengths = arrays[f"lengths/{name}"].astype(np.int64) if kind == "token" else None
            columns[name] = Column(torch.from_numpy(values), lengths)
    spread = "spread/"
    spreads = {
        name.removeprefix(spread): values
        for name, values in arrays.items()
        if name.startswith(spread)
    }
    means = {name: tuple(pair) for name, pair in contents["means"].items()}
    return Batch(columns, Metrics(means, contents["maxima"], spreads))
