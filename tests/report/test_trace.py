"""The timeline in the trace event format."""

from __future__ import annotations

import gzip
import json

from helpers.recorded import made_run, spans_of

from hybridflow.report.trace import write_trace


def test_a_trace_has_pools_as_processes_and_ranks_as_threads(tmp_path):
    made_run(tmp_path / "a", spans=spans_of(1), metrics=[], rows=[])
    write_trace(tmp_path / "a", tmp_path / "trace.json.gz")
    with gzip.open(tmp_path / "trace.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]

    named = {
        (one["name"], one["pid"], one["tid"]): one["args"]["name"]
        for one in events
        if one["ph"] == "M"
    }
    assert named == {
        ("process_name", 1, 0): "main",
        ("thread_name", 1, 0): "main/0",
        ("thread_name", 1, 1): "main/1",
        ("process_name", 2, 0): "controller",
        ("thread_name", 2, 0): "controller",
    }
    [update] = [one for one in events if one["name"] == "actor/update" and one["tid"] == 1]
    assert (update["ph"], update["pid"], update["cat"]) == ("X", 1, "actor")
    assert abs(update["ts"] - 620_000) <= 1 and update["dur"] == 350_000  # microseconds
    assert update["args"] == {"step": 1, "waited_s": 0.02, "waited_for": "reward/score@main/0"}


def test_without_a_timeline_there_is_no_trace(tmp_path):
    made_run(tmp_path / "a", spans=[], metrics=[], rows=[])
    write_trace(tmp_path / "a", tmp_path / "trace.json.gz")
    assert not (tmp_path / "trace.json.gz").exists()
