"""A run that is killed and resumed, as each tracker has it: read back, and compared with metrics.jsonl."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.tiny import hybridflow, metrics, write

STEPS, EVERY = 9, 4
"""Steps of the run, and between its checkpoints: it is killed in step 7, and goes on after step 4."""
READ = ("reward/scores", "actor/loss", "actor/response_length", "validation/score")

Point = tuple[int, str, float]
"""(step, metric, value), in the order in which the tracker got them."""


def records_of(file: Path) -> Iterator[bytes]:
    """The records of a file that `wandb sync` reads: a LevelDB log behind a header of 7 bytes."""
    data, at, block = file.read_bytes(), 7, 32768
    assert data[:4] == b":W&B"
    record = b""
    while at + 7 <= len(data):
        left = block - at % block
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def of_wandb(run: Path) -> Iterator[Point]:
    from wandb.proto import wandb_internal_pb2

    files = sorted(run.glob("wandb/offline-run-*/*.wandb"), key=lambda file: file.stat().st_mtime)
    ids = {file.stem.removeprefix("run-") for file in files}
    assert len(files) == 2 and len(ids) == 1  # both starts belong to one run
    for file in files:
        for data in records_of(file):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            items = {
                ("/".join(item.nested_key) or item.key): json.loads(item.value_json)
                for item in record.history.item
            }
            for name, value in items.items():
                if name in READ:
                    yield items["step"], name, value


def of_mlflow(run: Path) -> Iterator[Point]:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{run.parents[1]}/mlflow.db")
    [experiment] = [one for one in client.search_experiments() if one.name == "ours"]
    [found] = client.search_runs([experiment.experiment_id])
    assert found.info.status == "FINISHED" and found.info.run_name == "tiny"
    assert found.data.params["algorithm.group_size"] == "4"
    assert found.data.tags["group"] == "night" and found.data.tags["tag.small"] == "true"
    tables = [entry["path"] for entry in json.loads(found.data.tags["mlflow.loggedArtifacts"])]
    assert tables[0] == "samples/train-00000001.json" and len(tables) == len(set(tables))
    for name in READ:
        for entry in client.get_metric_history(found.info.run_id, name):
            yield entry.step, name, entry.value


def of_trackio(run: Path) -> Iterator[Point]:
    script = (
        "import json, sys; from trackio.sqlite_storage import SQLiteStorage as S; "
        "[own] = S.get_runs('ours'); print(json.dumps([own, S.get_logs('ours', own)], default=str))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    name, logs = json.loads(done.stdout.splitlines()[-1])
    assert name.startswith("tiny-")
    for entry in logs:
        for key in READ:
            if key in entry:
                yield entry["step"], key, entry[key]


def of_swanlab(run: Path) -> Iterator[Point]:
    from swanlab.exceptions import DataStoreError
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    files = sorted(run.glob("swanlab/run-*/*.swanlab"), key=lambda file: file.stat().st_mtime)
    assert len(files) == 2  # each start has its own, offline
    for file in files:
        reader = DataStoreReader()
        reader.open(file)
        while True:
            try:
                data = reader.scan()
            except DataStoreError:  # what was being written when it was killed
                assert file == files[0]
                break
            if data is None:
                break
            record = Record()
            record.ParseFromString(data)
            if record.scalar.key in READ:
                yield record.scalar.step, record.scalar.key, record.scalar.value.number


SETTINGS = {
    "wandb": 'mode = "offline"',
    "mlflow": 'uri = "sqlite:///mlflow.db"',
    "trackio": "",
    "swanlab": 'mode = "offline"',
}
READERS: dict[str, Callable[[Path], Iterator[Point]]] = {
    "wandb": of_wandb,
    "mlflow": of_mlflow,
    "trackio": of_trackio,
    "swanlab": of_swanlab,
}


@pytest.mark.parametrize("name", READERS)
def test_a_run_that_was_killed_and_resumed_is_whole(tmp_path, monkeypatch, name):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    common = 'project = "ours", group = "night", tags = ["small"], samples_every = 3'
    tracker = f'{{ name = "{name}", {common}{", " * bool(SETTINGS[name])}{SETTINGS[name]} }}'
    write(
        tmp_path,
        **{'trackers = ["jsonl"]': f'trackers = ["jsonl", {tracker}]\ncheckpoint_every = {EVERY}'},
    )
    settings = [
        f"run.steps={STEPS}",
        "reward.function=rewards:kills_itself",
        # 16 rows a step, and a row that is tried beforehand
        "reward.options.at=105",
        "validation.every=3",
        "validation.data.limit=4",
    ]
    killed = hybridflow(tmp_path, "run", "tiny.toml", *settings)
    assert killed.returncode < 0 and (tmp_path / "killed").exists(), killed.stdout + killed.stderr
    run = tmp_path / "runs/tiny"
    before = metrics(run)
    assert before[-1]["step"] > EVERY
    resumed = hybridflow(tmp_path, "run", "tiny.toml", *settings, "--resume")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert "left out" not in resumed.stdout and " lost " not in resumed.stdout

    written = {(row["step"], key): row[key] for row in metrics(run) for key in READ if key in row}
    got: dict[tuple[int, str], list[float]] = defaultdict(list)
    for step, key, value in READERS[name](run):
        got[step, key].append(value)
    assert {key: values[-1] for key, values in got.items()} == pytest.approx(written)
    assert {step for step, _ in got} >= set(range(1, STEPS + 1))
    repeated = {step for (step, _), values in got.items() if len(values) > 1}
    # Only what was logged before the kill and is after the checkpoint
    assert repeated <= {row["step"] for row in before if row["step"] > EVERY}
