"""A run's recorder: samples and times on the disk when they are due."""

from __future__ import annotations

import base64
import gzip
import json
import re
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.jobs import job_of
from helpers.tiny import ran_here, write

from hybridflow.cli.main import main
from hybridflow.core.contracts.observer import Span
from hybridflow.kit.recording import SAMPLES, TIMELINE, read_rows
from hybridflow.report import recorder
from hybridflow.report.recorder import RunRecording


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """A finished run of two steps, which was validated."""
    folder = tmp_path_factory.mktemp("recorded")
    write(folder)
    ran_here(folder, "run.steps=2", "run.samples=2", "validation.samples=3", "validation.every=2")
    return folder / "runs/tiny"


def test_a_run_leaves_its_samples(ran):
    rows = list(read_rows(ran, SAMPLES))
    found = [(row["step"], row["data"]) for row in rows]
    # Two groups of four in each step, and three rows of the validation
    assert found == [(1, "train")] * 8 + [(2, "train")] * 8 + [(2, "validation")] * 3
    assert all(len({row["group"] for row in rows[at : at + 4]}) == 1 for at in (0, 4, 8, 12))
    for row in rows[:16]:
        lengths = {len(row[name]) for name in ("response_ids", "advantages", "logprobs")}
        assert lengths == {len(row["response_tokens"])}


def test_a_run_leaves_what_its_processes_did(ran):
    spans = list(read_rows(ran, TIMELINE))
    assert {span["step"] for span in spans} == {0, 1, 2}
    names = {f"{span['role']}/{span['name']}" for span in spans if span["step"] == 1}
    assert {"data/draw", "actor/generate", "actor/generate/tokens", "actor/update"} <= names
    assert {span["process"] for span in spans} - {"controller"} == {"main/0"}
    assert "actor/build" in {f"{span['role']}/{span['name']}" for span in spans if not span["step"]}

    # One process does one thing at a time.
    calls = [span for span in spans if span["process"] == "main/0" and "/" not in span["name"]]
    for before, after in pairwise(calls):
        assert after["start"] >= before["start"] + before["seconds"] - 1e-3


def test_what_was_taken_is_written_when_it_is_due(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(recorder.time, "monotonic", lambda: now[0])
    job = job_of(tmp_path, run={"report": False})
    recording = RunRecording(job)
    recording.begin(SimpleNamespace(step=0, session=SimpleNamespace(memory=())))

    def taken(step):
        recording.spans(step, [Span("main/0", "actor", "update", 5.0, 1.0)])
        recording.step({})
        return [span["step"] for span in read_rows(job.folder, TIMELINE)]

    assert taken(1) == []
    now[0] += recorder.FLUSH_S
    assert taken(2) == [1, 2]
    assert taken(3) == [1, 2]
    recording.checkpoint(3)
    assert [span["step"] for span in read_rows(job.folder, TIMELINE)] == [1, 2, 3]
    assert taken(4) == [1, 2, 3]
    recording.close()
    spans = list(read_rows(job.folder, TIMELINE))
    assert [span["step"] for span in spans] == [1, 2, 3, 4]
    assert spans[0] == {
        "step": 1,
        "process": "main/0",
        "role": "actor",
        "name": "update",
        "start": 5.0,
        "seconds": 1.0,
        "waited": 0.0,
        "waited_for": "",
    }


def state_in(page: Path) -> str:
    [packed] = re.findall(r'<script id="data" type="text/plain">([^<]*)</script>', page.read_text())
    [run] = json.loads(gzip.decompress(base64.b64decode(packed)))["runs"]
    return run["state"]


def test_a_run_leaves_a_page_however_it_ended(ran, tmp_path, monkeypatch, capsys):
    assert state_in(ran / "report.html") == "finished"
    assert (ran / "trace.json.gz").is_file()

    write(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "rewards", raising=False)
    assert main(["run", "tiny.toml", "reward.function=rewards:raises_later"]) == 1
    assert "no such unit" in capsys.readouterr().err
    assert state_in(tmp_path / "runs/tiny/report.html") == "ended"
    assert main(["run", "tiny.toml", "run.steps=1", "run.report=false", "run.name=other"]) == 0
    assert not (tmp_path / "runs/other/report.html").exists()
    monkeypatch.delitem(sys.modules, "rewards", raising=False)


def test_a_page_that_cannot_be_written_is_told_and_stops_nothing(tmp_path):
    write(tmp_path)
    (tmp_path / "runs/tiny/report.html").mkdir(parents=True)
    said = ran_here(tmp_path, "run.steps=1")
    assert "RunRecording lost the end of the run: " in said and "cannot be written" in said
