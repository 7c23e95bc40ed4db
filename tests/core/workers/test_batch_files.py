"""A batch in a file is what it was, or is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hybridflow.core.errors import DamagedError
from hybridflow.core.values.batch import Batch
from hybridflow.core.values.columns import tokens
from hybridflow.core.values.metrics import Metrics
from hybridflow.core.workers.batch_files import read_batch, write_batch


def made() -> Batch:
    columns = {
        "response_ids": tokens([torch.tensor([3, 1]), torch.tensor([], dtype=torch.int64)]),
        "rollout_logprobs": tokens([torch.tensor([-0.1, -1e-30]), torch.tensor([])], torch.float32),
        "loss_mask": tokens([torch.tensor([1, 0]), torch.tensor([])], torch.uint8),
        "episode_return": torch.tensor([0.1, float("nan")]),
        "finish_reason": ["stop", "length"],
        "turn_rewards": [[0.1, 1e-17], []],
    }
    spread = {"response_length": np.array([2.0, 0.0])}
    return Batch(columns, Metrics({"a": (0.1, 3.0)}, {"b": 7.0}, spread))


def test_columns_and_metrics_come_back_bit_for_bit(tmp_path):
    batch = made()
    read = read_batch(tmp_path / "rows.npz", write_batch(tmp_path / "rows.npz", batch))
    assert read.names == batch.names and read.rows == 2
    for name in batch.names:
        now, then = read[name], batch[name]
        assert now.kind == then.kind
        if then.kind == "object":
            assert now.values == then.values
            continue
        assert now.values.dtype == then.values.dtype
        assert now.values.numpy().tobytes() == then.values.numpy().tobytes()
        assert then.lengths is None or now.lengths.tolist() == then.lengths.tolist()
    assert read.metrics.values() == batch.metrics.values()
    assert read.metrics.means == {"a": (0.1, 3.0)}


def test_whole_numbers_take_as_many_bytes_as_they_need(tmp_path):
    large = [2**31, -(2**40)]
    columns = {
        "response_ids": tokens([torch.arange(1000) + 30_000], torch.int64),
        "weight_version": tokens([torch.full((1000,), 200)], torch.int32),
        "lag": tokens([torch.full((1000,), -128)], torch.int8),
        "large": tokens([torch.tensor(large)], torch.int64),
    }
    file = tmp_path / "rows.npz"
    read = read_batch(file, write_batch(file, Batch(columns)))
    for name, column in columns.items():
        assert read[name].values.dtype == column.values.dtype
        assert read[name].values.tolist() == column.values.tolist()
    with np.load(file) as arrays:
        widths = {name: arrays[name].dtype.itemsize for name in arrays.files}
    assert [widths[f"values/{name}"] for name in columns] == [2, 2, 1, 8]
    assert file.stat().st_size < 1000 * 5 + 3000


def test_a_batch_without_rows_comes_back(tmp_path):
    empty = made().take(slice(0, 0))
    read = read_batch(tmp_path / "rows.npz", write_batch(tmp_path / "rows.npz", empty))
    assert read.rows == 0 and read.names == empty.names


def test_any_other_file_is_refused(tmp_path):
    file = tmp_path / "rows.npz"
    digest = write_batch(file, made())
    whole = file.read_bytes()
    with pytest.raises(DamagedError, match="another checksum"):
        read_batch(file, write_batch(tmp_path / "other.npz", made().take([1])))
    file.write_bytes(whole[:60] + bytes([whole[60] ^ 1]) + whole[61:])
    with pytest.raises(DamagedError, match="another checksum"):
        read_batch(file, digest)
    file.unlink()
    with pytest.raises(DamagedError, match="cannot be read"):
        read_batch(file, digest)


def test_objects_that_json_does_not_know_cannot_be_kept(tmp_path):
    with pytest.raises(TypeError):
        write_batch(tmp_path / "rows.npz", Batch({"meta": [object()]}))
