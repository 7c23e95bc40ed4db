"""What a user's second Ctrl-C does."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest
from helpers.tiny import write


@pytest.mark.parametrize("gap", [0.1, 0.4])
def test_f26_a_second_interruption_has_the_status_of_the_first(tmp_path, gap):
    """It comes while the run is ended, or while Python itself ends."""
    write(tmp_path)
    command = [sys.executable, "-m", "hybridflow.cli.main", "run", "tiny.toml", "run.steps=5000"]
    run = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert run.stdout is not None
    for line in run.stdout:
        if " step " in line:
            break
    run.send_signal(signal.SIGINT)
    time.sleep(gap)
    run.send_signal(signal.SIGINT)
    said = run.stdout.read()
    assert run.wait(60) == 130
    assert "hybridflow: interrupted" in said
    assert "Traceback" not in said
