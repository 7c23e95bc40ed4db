"""metrics.jsonl: what is written, and what a resumed run keeps of it."""

from __future__ import annotations

import json
import time

import pytest

from hybridflow.backends.trackers.jsonl import JsonlTracker


@pytest.fixture
def started(tmp_path):
    """started(step): a tracker of one folder, closed at the end."""
    trackers = []

    def start(step):
        trackers.append(JsonlTracker())
        trackers[-1].start(tmp_path, step)
        return trackers[-1]

    yield start
    for tracker in trackers:
        tracker.close()


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_each_step_is_one_line_that_others_can_read_at_once(started, tmp_path):
    tracker, before = started(0), time.time()
    tracker.log(1, {"loss": 0.5, "reward/mean": 2.0})
    (row,) = rows(tmp_path)
    assert before <= row.pop("timestamp") <= time.time()
    assert row == {"step": 1, "loss": 0.5, "reward/mean": 2.0}
    tracker.log(2, {"loss": 0.25})
    assert rows(tmp_path)[1].items() >= {"step": 2, "loss": 0.25}.items()


def test_a_resumed_run_forgets_the_steps_that_it_makes_again(started, tmp_path):
    first = started(0)
    for step in (1, 2, 3, 4):
        first.log(step, {"run": 1})
    first.close()
    started(2).log(3, {"run": 2})
    assert [(row["step"], row["run"]) for row in rows(tmp_path)] == [(1, 1), (2, 1), (3, 2)]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_lines_that_a_killed_run_left_half_written_are_dropped(started, tmp_path):
    whole = '{"step": 1, "loss": 1.0}\n'
    for left in ('{"step": 2, "lo', '{"step": 2}', '{"loss": 3}\n', "null\n", "\0\0\0\n"):
        (tmp_path / "metrics.jsonl").write_text(whole + left)
        started(5)
        assert (tmp_path / "metrics.jsonl").read_text() == whole, left
