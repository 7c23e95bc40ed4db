"""Runs as their folders say; what is printed of them is in tests/cli/test_runs.py."""

from __future__ import annotations

import fcntl

import pytest
from helpers.recorded import made_run, metrics_of

from hybridflow.core.errors import ConfigError
from hybridflow.kit.runs import differing, find_runs, logged


def test_a_run_is_found_with_its_state_and_how_far_it_came(tmp_path):
    made_run(tmp_path / "x/a")
    half = made_run(tmp_path / "x/b", {"run.seed": 1}, done=False, steps=7)
    whole, part = find_runs(tmp_path)
    assert (whole.state, whole.step, whole.algorithm) == ("finished", 40, "grpo")
    assert (part.state, part.step) == ("ended", 7)
    assert differing([whole, part]) == {"run.seed": [0, 1]}
    with open(half / ".lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert find_runs(half)[0].state == "running"
    (half / "run.json").write_text("{")
    assert find_runs(half)[0].state == "damaged"
    with pytest.raises(ConfigError, match="no such folder"):
        find_runs(tmp_path / "y")


def test_lines_that_are_cut_off_or_damaged_are_no_metrics(tmp_path):
    folder = made_run(tmp_path / "a", metrics=[metrics_of(1)], rows=[], spans=[])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('nonsense\n[1]\n{"step": "x"}\n{"step": 2}\n{"step": 3')
    assert [row["step"] for row in logged(folder)] == [1, 2]
    assert logged(tmp_path) == []
