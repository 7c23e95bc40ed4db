"""`hybridflow run --supervise`: kills, a stop and signals of real runs."""

from __future__ import annotations

import os
import signal

import pytest
from helpers.tiny import exported, learning, ran_here, write
from helpers.waiting import eventually
from helpers.watched import WatchedRun

from hybridflow.core.processes.look import state_of

SETTINGS = ("run.steps=60", "run.checkpoint_every=2", "run.report=false")
RAY = "runtime={name='ray', threads=1}"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    write(folder)
    ran_here(folder, *SETTINGS)
    return folder / "runs/tiny"


def supervised(tmp_path, *settings: str) -> WatchedRun:
    folder = tmp_path / "cut"
    folder.mkdir(exist_ok=True)
    write(folder)
    return WatchedRun(folder, *SETTINGS, "--supervise", *settings)


@pytest.mark.timeout(300)
def test_a_controller_that_is_killed_or_stopped_is_replaced_and_no_bit_differs(tmp_path, whole):
    # It is killed before the first checkpoint, and stopped after it.
    settings = ("run.hang=restart", "run.patience_s=3", "run.checkpoint_every=12")
    with supervised(tmp_path, *settings) as one:
        for sent, reached in (("KILL", 4), ("STOP", 24)):
            one.steps(reached)
            pid = one.look("controller").pid
            os.kill(pid, getattr(signal, f"SIG{sent}"))
            one.until(lambda pid=pid: state_of(pid) == "gone")
        assert one.ends() == 0, one.output
        assert one.output.count("supervisor: the run has ended by SIGKILL; start") == 2
        assert "has made no sign for 3 s; it is ended" in one.output
        assert one.last_step == 60
    assert exported(one.kept) == exported(whole)
    assert learning(one.kept) == learning(whole)


@pytest.mark.timeout(300)
def test_sigterm_is_passed_on_once_and_what_is_queued_again_goes_on(tmp_path, whole):
    with supervised(tmp_path) as one:
        one.steps(5)
        # As a scheduler does, to all processes of a job.
        run = one.look("controller").pid
        for pid in (run, one.process.pid):
            os.kill(pid, signal.SIGTERM)
        assert one.ends() == 99, one.output
        assert "told to stop: the checkpoint of step" in one.output
        assert "start 2" not in one.output
    with supervised(tmp_path, "--resume") as one:
        assert one.ends() == 0, one.output
    assert exported(one.kept) == exported(whole)
    assert learning(one.kept) == learning(whole)


@pytest.mark.timeout(300)
def test_a_run_ends_with_its_supervisor_and_leaves_a_checkpoint(tmp_path):
    with supervised(tmp_path) as one:
        one.steps(5)
        run = one.look("controller").pid
        one.process.kill()
        one.process.wait()
    eventually(lambda: state_of(run) == "gone", 60)
    assert "told to stop: the checkpoint of step" in one.output
