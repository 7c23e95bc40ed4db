"""`hybridflow runs`: what the folders of runs tell, what differs, and how they go."""

from __future__ import annotations

import fcntl
import io
import json
import subprocess
import sys

import pytest

from hybridflow.cli.main import main
from hybridflow.core.values.sealed import write_sealed


def made(folder, settings=None, done=None, metrics=(), steps=(), export=False):
    """A run's folder, as runs write it."""
    folder.mkdir(parents=True)
    mark = {"config": {"algorithm": {"name": "grpo"}}, "settings": settings or {}, "versions": {}}
    write_sealed(folder / "run.json", mark)
    (folder / ".lock").touch()
    if done is not None:
        write_sealed(folder / "done.json", done)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    for step in steps:
        (folder / f"checkpoints/step-{step:08d}").mkdir(parents=True)
        (folder / f"checkpoints/step-{step:08d}/state.json").write_text("{}")
    if export:
        (folder / "export/actor").mkdir(parents=True)
    return folder


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    validations = {"0": {"validation/score": 0.1}, "9": {"validation/score": 0.75}}
    made(
        tmp_path / "runs/a",
        {"run.seed": 0, "lr": 0.1},
        {"step": 9, "validations": validations},
        export=True,
    )
    rows = [
        {"step": 1, "loss": 1.0},
        {"step": 2, "validation/score": 0.5},
        {"step": 3, "loss": 0.5},
    ]
    made(tmp_path / "runs/demo/grpo", {"run.seed": 0, "lr": 0.2, "tp": 2}, None, rows, steps=(2, 3))
    return tmp_path


def lines(capsys) -> dict[str, list[str]]:
    printed = capsys.readouterr().out.splitlines()
    return {line.split()[0]: line.split() for line in printed if line.strip()}


def test_runs_are_listed_with_what_they_reached_and_what_they_keep(here, capsys):
    with open(here / "runs/demo/grpo/metrics.jsonl", "a") as file:
        file.write('{"step": 4, "lo')  # being written
    assert main(["runs"]) == 0
    found = lines(capsys)
    assert found["runs/a"][1:6] == ["grpo", "finished", "9", "0.750", "exported"]
    assert found["runs/demo/grpo"][1:9] == [
        "grpo",
        "ended",
        "3",
        "0.500",
        "step",
        "2,",
        "step",
        "3",
    ]


def test_a_run_that_is_held_is_running_and_is_not_deleted(here, capsys):
    with open(here / "runs/demo/grpo/.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert main(["runs", "runs/demo"]) == 0
        assert lines(capsys)["runs/demo/grpo"][2] == "running"
        assert main(["runs", "runs/demo", "--delete", "--yes"]) == 1
    assert "runs/demo/grpo is running; stop it first" in capsys.readouterr().err
    assert (here / "runs/demo/grpo/run.json").exists()


def test_settings_that_differ_are_compared(here, capsys):
    assert main(["runs", "runs/a", "runs/demo/grpo", "--compare"]) == 0
    found = lines(capsys)
    assert found["score"] == ["score", "0.750", "0.500"]
    assert found["lr"] == ["lr", "0.1", "0.2"] and found["tp"] == ["tp", "null", "2"]
    assert "run.seed" not in found
    assert main(["runs", "runs/a", "--compare"]) == 1
    assert "needs two runs at least" in capsys.readouterr().err


def test_runs_are_deleted_after_a_question(here, capsys, monkeypatch):
    assert main(["runs", "runs/a", "--delete"]) == 1
    assert "nobody is there to be asked; give --yes" in capsys.readouterr().err

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stdin", Terminal("n\n"))
    assert main(["runs", "runs/a", "--delete"]) == 1 and (here / "runs/a").exists()
    monkeypatch.setattr(sys, "stdin", Terminal("y\n"))
    assert main(["runs", "runs/a", "--delete"]) == 0 and not (here / "runs/a").exists()
    assert main(["runs", "runs/demo", "--delete", "--yes"]) == 0
    assert not (here / "runs/demo/grpo").exists()


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["none"], "there is no such folder"),
        (["."], "has no runs"),
        (["--delete"], "name the runs"),
    ],
)
def test_what_is_no_run_is_refused(tmp_path, monkeypatch, capsys, arguments, said):
    monkeypatch.chdir(tmp_path)
    assert main(["runs", *arguments]) == 1
    assert said in capsys.readouterr().err


def test_no_torch_is_imported(here):
    script = "import sys; from hybridflow.cli.main import main; main(['runs']); print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=here, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "False"
