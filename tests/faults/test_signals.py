"""What a second Ctrl-C does, and what a SIGTERM does while a run starts."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.paths import matrix
from helpers.tiny import write

from hybridflow.backends.ray import reaper


def started(folder, until, *settings):
    """A run of 5,000 steps that has just printed a line with `until`."""
    write(folder)
    run = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "hybridflow.cli.main",
            "run",
            "tiny.toml",
            "run.steps=5000",
            *settings,
        ],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert run.stdout is not None
    for line in run.stdout:
        if until in line:
            return run
    raise AssertionError(f"it ended before {until!r}")


@pytest.mark.parametrize("gap", [0.1, 0.4])
@matrix
def test_f26_a_second_interruption_has_the_status_of_the_first(tmp_path, gap):
    """It comes while the run is ended, or while Python itself ends."""
    run = started(tmp_path, " step ")
    run.send_signal(signal.SIGINT)
    time.sleep(gap)
    run.send_signal(signal.SIGINT)
    said = run.stdout.read()
    assert run.wait(60) == 130
    assert "hybridflow: interrupted" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("until", [pytest.param("starting ray", marks=matrix), "starting pool"])
def test_f24_a_sigterm_while_a_run_starts_stops_it(tmp_path, short, monkeypatch, until):
    monkeypatch.setenv("TMPDIR", str(short))
    run = started(tmp_path, until, "runtime.name=ray")
    while not (folders := list(short.glob("hybridflow-ranks-*"))):
        time.sleep(0.05)
    folder = str(folders[0])
    while not reaper.remaining(folder, {}):
        time.sleep(0.05)
    run.send_signal(signal.SIGTERM)
    said = run.stdout.read()
    assert run.wait(60) == 99, said
    end = "told to stop while it started: nothing was trained; go on with --resume"
    assert said.splitlines()[-1].endswith(end), said
    assert not Path(folder).exists() and reaper.remaining(folder, {}) == {}
