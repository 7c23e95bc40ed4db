"""Part files of recorded rows: what is written is read, bounded, and cut where a run goes on."""

from __future__ import annotations

import json
import os
import sys

import numpy as np
import pytest

from hybridflow.core.errors import ConfigError, DamagedError
from hybridflow.kit import recording
from hybridflow.kit.recording import (
    RecordedTable,
    can_write_parquet,
    parts_of,
    read_rows,
    recorded_every,
)

NAME = "samples"


@pytest.fixture(params=["parquet", "jsonl"])
def form(request, monkeypatch):
    """Both forms of parts: with pyarrow, and without."""
    if request.param == "jsonl":
        monkeypatch.setattr(recording, "can_write_parquet", lambda: False)
    else:
        assert can_write_parquet()
    return request.param


def row(step: int, at: int = 0, length: int = 5, **more) -> dict:
    generator = np.random.default_rng([step, at])
    return {
        "step": step,
        "group": at,
        "response": f"é {step}\u2028",
        "response_ids": generator.integers(0, 60_000, length, dtype=np.int32),
        "rollout_logprobs": generator.standard_normal(length, dtype=np.float32),
        **more,
    }


def plain(rows) -> list[dict]:
    return [
        {
            name: value.tolist() if isinstance(value, np.ndarray) else value
            for name, value in one.items()
        }
        for one in rows
    ]


def steps_of(folder) -> list[int]:
    return [one["step"] for one in read_rows(folder, NAME, ["step"])]


def written(folder, steps, **options) -> RecordedTable:
    table = RecordedTable(folder, NAME, options.pop("most_bytes", 10**9))
    table.begin(0)
    for step in steps:
        table.add([row(step, **options)])
        table.flush()
    return table


def test_rows_are_read_as_they_were_written_to_the_last_bit(tmp_path, form):
    table = RecordedTable(tmp_path, NAME, 10**9)
    table.begin(0)
    rows = [row(1), row(1, 1, scores=0.5, outcome="complete"), row(2, length=0)]
    table.add(rows[:2])
    table.add(rows[2:])
    assert list(read_rows(tmp_path, NAME)) == []  # nothing is written before it is due
    table.flush()
    assert list(read_rows(tmp_path, NAME)) == plain(rows)
    some = list(read_rows(tmp_path, NAME, ["step", "scores"]))
    assert some == [{"step": 1}, {"step": 1, "scores": 0.5}, {"step": 2}]
    [part] = parts_of(tmp_path / "recording", NAME)
    assert part.name == f"samples-00000001.{form}"


def test_large_parts_are_complete_and_another_one_is_begun(tmp_path, form, monkeypatch):
    monkeypatch.setattr(recording, "PART_BYTES", 5_000)
    written(tmp_path, range(1, 40), length=100)
    assert steps_of(tmp_path) == list(range(1, 40))
    parts = parts_of(tmp_path / "recording", NAME)
    assert len(parts) > 3
    times = [part.stat().st_mtime_ns for part in parts]
    table = RecordedTable(tmp_path, NAME, 10**9)
    table.begin(39)
    table.add([row(40)])
    table.flush()
    # The complete ones are not touched again.
    assert [part.stat().st_mtime_ns for part in parts[:-1]] == times[:-1]
    assert steps_of(tmp_path) == list(range(1, 41))


def test_rows_of_a_large_step_that_come_later_do_not_replace_the_first_ones(
    tmp_path, form, monkeypatch
):
    """As those of a validation after the step's own."""
    monkeypatch.setattr(recording, "PART_BYTES", 100)
    table = RecordedTable(tmp_path, NAME, 10**9)
    table.begin(0)
    for step in (1, 2):
        for number in range(3):
            table.add([row(step, number, length=100)])
            table.flush()
    assert steps_of(tmp_path) == [1, 1, 1, 2, 2, 2]
    assert len(parts_of(tmp_path / "recording", NAME)) == 2


def test_a_run_that_goes_on_has_no_rows_of_later_steps_and_none_twice(tmp_path, form, monkeypatch):
    monkeypatch.setattr(recording, "PART_BYTES", 5_000)
    written(tmp_path, range(1, 40), length=100)
    before = list(read_rows(tmp_path, NAME))
    (tmp_path / "recording/samples-00000099.parquet.partial").write_bytes(b"killed here")
    table = RecordedTable(tmp_path, NAME, 10**9)
    table.begin(20)
    assert steps_of(tmp_path) == list(range(1, 21))
    for step in range(21, 40):
        table.add([row(step, length=100)])
    table.flush()
    assert list(read_rows(tmp_path, NAME)) == before
    assert not list((tmp_path / "recording").glob("*.partial"))

    # From its beginning: nothing is left.
    RecordedTable(tmp_path, NAME, 10**9).begin(0)
    assert steps_of(tmp_path) == []


def test_a_table_stays_within_its_bound_and_covers_the_whole_run(tmp_path, form, monkeypatch):
    monkeypatch.setattr(recording, "PART_BYTES", 20_000)
    bound = 100_000
    table = RecordedTable(tmp_path, NAME, bound)
    table.begin(0)
    for step in range(1, 1001):
        table.add([row(step, length=100)])
        if step % 10 == 0:
            table.flush()
            sizes = [part.stat().st_size for part in parts_of(tmp_path / "recording", NAME)]
            assert sum(sizes) <= bound
    table.flush()
    steps = steps_of(tmp_path)
    every = recorded_every(tmp_path, NAME)
    assert every in (4, 8, 16, 32) and steps == list(range(1, 1001, every))

    # A run that goes on keeps the distance.
    table = RecordedTable(tmp_path, NAME, bound)
    table.begin(1000)
    for step in range(1001, 1001 + 2 * every):
        table.add([row(step, length=100)])
    table.flush()
    assert [step for step in steps_of(tmp_path) if step > 1000] == [
        step for step in range(1001, 1001 + 2 * every) if (step - 1) % every == 0
    ]


def test_a_step_that_is_too_large_is_cut_and_one_row_is_always_kept(tmp_path, form):
    table = RecordedTable(tmp_path, NAME, 160_000)  # 20,000 for a step
    table.begin(0)
    table.add([row(1, at, length=800) for at in range(9)])  # 6.4 kB and a little each
    table.add([row(2, length=3_000)])
    table.flush()
    assert [(one["step"], one["group"]) for one in read_rows(tmp_path, NAME)] == [
        (1, 0),
        (1, 1),
        (1, 2),
        (2, 0),
    ]


def test_a_place_of_its_own_thins_out_what_comes_rarely(tmp_path):
    table = RecordedTable(tmp_path, NAME, 10**9, place=lambda one: one["step"] // 10)
    table.begin(0)
    table.every = 2
    table.add([row(step) for step in (0, 10, 20, 30, 40)])
    table.flush()
    assert steps_of(tmp_path) == [0, 20, 40]


def test_what_was_recorded_in_the_other_form_is_read_too(tmp_path, monkeypatch):
    written(tmp_path, [1, 2, 3])
    with monkeypatch.context() as patch:
        patch.setattr(recording, "can_write_parquet", lambda: False)
        table = RecordedTable(tmp_path, NAME, 10**9)
        table.begin(2)
        table.add([row(3), row(4)])
        table.flush()
    assert sorted(os.listdir(tmp_path / "recording")) == [
        "samples-00000001.parquet",
        "samples-00000003.jsonl",
    ]
    assert list(read_rows(tmp_path, NAME)) == plain([row(step) for step in (1, 2, 3, 4)])


def test_a_part_of_which_nothing_is_kept_is_gone(tmp_path, form, monkeypatch):
    monkeypatch.setattr(recording, "PART_BYTES", 1)  # a part for each step
    written(tmp_path, range(1, 9), length=50, most_bytes=8_000)
    steps = steps_of(tmp_path)
    every = recorded_every(tmp_path, NAME)
    assert every > 1 and steps == list(range(1, 9, every))
    assert len(parts_of(tmp_path / "recording", NAME)) == len(steps)
    [part] = parts_of(tmp_path / "recording", NAME)[:1]
    assert recording.read_part(part, numbers=[]) == []


def test_a_part_that_is_damaged_is_told_by_its_name(tmp_path, form):
    written(tmp_path, [1, 2])
    [part] = parts_of(tmp_path / "recording", NAME)
    data = part.read_bytes()
    part.write_bytes(data[: len(data) // 2] + b"\n")
    with pytest.raises(DamagedError, match=f"{part.name} is damaged"):
        list(read_rows(tmp_path, NAME))


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    written(tmp_path, [1])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"pip install 'hybridflow\[data\]'"):
        list(read_rows(tmp_path, NAME))


def test_a_damaged_list_of_distances_is_no_list(tmp_path):
    written(tmp_path, [1])
    for text in ("{", "[]", f'{{"{NAME}": "2"}}', f'{{"{NAME}": 0}}'):
        (tmp_path / "recording/every.json").write_text(text)
        assert recorded_every(tmp_path, NAME) == 1
    (tmp_path / "recording/every.json").write_text(json.dumps({NAME: 8}))
    assert recorded_every(tmp_path, NAME) == 8
