"""`hybridflow run`: how it ends, and what it does with a run that is there already."""

from __future__ import annotations

import json
import signal

import pytest

from hybridflow.cli.main import main
from hybridflow.settle import launch


def run(*arguments: str) -> int:
    return main(["run", "tiny.toml", *arguments])


def steps(folder) -> list[int]:
    lines = (folder / "runs/tiny/metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


def test_a_missing_file_is_named(capsys, path):
    assert main(["run", "no/such.toml"]) == 1
    assert "no/such.toml: cannot be read" in capsys.readouterr().err


def test_resume_and_overwrite_contradict_each_other(tiny, capsys):
    assert run("--resume", "--overwrite") == 1
    assert "contradict each other" in capsys.readouterr().err
    assert not (tiny / "runs").exists()


def test_sigterm_while_it_is_imported_or_between_stages_ends_it_as_in_a_run(tiny, monkeypatch):
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(launch, "run", lambda *_: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(SystemExit) as end:
        run("run.steps=1")
    assert end.value.code == 99 and signal.getsignal(signal.SIGTERM) == before


def test_a_run_that_is_there_is_gone_on_with_or_replaced_as_asked(tiny, capsys):
    assert run("run.steps=1") == 0
    assert run("run.steps=2") == 1
    assert "there is a run in runs/tiny already" in capsys.readouterr().err
    assert run("run.steps=2", "--resume") == 0 and steps(tiny) == [1, 2]
    assert run("run.steps=1", "--overwrite") == 0 and steps(tiny) == [1]
