"""A run's folder belongs to one process; and SIGTERM is a question, once."""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import signal
import threading
import time
from importlib.metadata import version

import pytest
from helpers.jobs import job_of
from helpers.sleepers import sleeper

from hybridflow.core.errors import ConfigError
from hybridflow.core.running.folder import StopRequested, StopSignal, claim, versions, write_mark
from hybridflow.core.values.sealed import read_sealed


def test_a_mark_says_what_runs_in_a_folder(tmp_path):
    job = job_of(tmp_path)
    with claim(job, resume=False, overwrite=False):
        assert [path.name for path in job.folder.iterdir()] == [".lock"]
        write_mark(job, {"beside": tmp_path})
    written = read_sealed(job.folder / "run.json")
    assert written["beside"] == str(tmp_path)
    assert written["config"]["algorithm"]["name"] == "grpo"
    assert written["config"]["sampling"] == {"max_tokens": 4}
    assert written["versions"]["python"] == platform.python_version()


def test_a_folder_is_held_by_one_process_at_a_time(tmp_path):
    job = job_of(tmp_path)
    with (
        claim(job, resume=False, overwrite=False),
        pytest.raises(ConfigError, match=r"another process runs in .*run\.name"),
        claim(job, resume=True, overwrite=True),
    ):
        raise AssertionError("two runs in one folder")
    with (
        claim(job, resume=True, overwrite=False),
        open(job.folder / ".lock") as lock,
        pytest.raises(BlockingIOError),
    ):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_run_that_is_replaced_leaves_no_stopped_process(tmp_path):
    job = job_of(tmp_path)
    pages = job.folder / "processes"
    pages.mkdir(parents=True)
    (job.folder / "run.json").write_text("{}")
    with sleeper(pages, stopped=True) as left, claim(job, resume=False, overwrite=True):
        assert left.wait(30) == -signal.SIGKILL
        assert not pages.exists()


def test_a_run_that_is_there_is_gone_on_with_or_replaced_if_that_was_asked_for(tmp_path):
    job = job_of(tmp_path)
    (job.folder / "checkpoints" / "step-00000001").mkdir(parents=True)
    (job.folder / "metrics.jsonl").write_text("{}\n")
    (job.folder / "run.json").write_text("{}")
    said = r"there is a run in .*--resume.*--overwrite"
    with pytest.raises(ConfigError, match=said), claim(job, False, False):
        raise AssertionError("the run was overwritten")
    assert (job.folder / "run.json").read_text() == "{}"

    with claim(job, resume=True, overwrite=False):
        assert (job.folder / "metrics.jsonl").exists() and (job.folder / "checkpoints").exists()
    with claim(job, resume=False, overwrite=True):
        assert [path.name for path in job.folder.iterdir()] == [".lock"]


def test_files_that_are_no_run_stay(tmp_path):
    job = job_of(tmp_path)
    job.folder.mkdir(parents=True)
    (job.folder / "notes.txt").write_text("mine")
    with claim(job, resume=False, overwrite=False):
        pass
    assert (job.folder / "notes.txt").read_text() == "mine"


def test_versions_are_of_ours_and_of_what_the_plugins_need(tmp_path):
    found = versions(job_of(tmp_path))
    assert found["python"] == platform.python_version()
    for package in ("hybridflow", "torch", "numpy", "transformers"):
        assert found[package] == version(package), package
    assert "ray" not in found and "peft" not in found  # nothing of this job needs them


def test_the_first_sigterm_asks_and_the_second_one_is_as_usual(received):
    with StopSignal() as stop:
        stop.begin()
        assert not stop.requested
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested and received == []
        os.kill(os.getpid(), signal.SIGTERM)
        assert received == [signal.SIGTERM]
    os.kill(os.getpid(), signal.SIGTERM)
    assert len(received) == 2


def test_a_sigterm_at_the_start_ends_the_start(received):
    with pytest.raises(StopRequested), StopSignal():
        os.kill(os.getpid(), signal.SIGTERM)
    assert received == []


def test_a_stop_that_got_lost_at_the_start_is_taken_at_its_end(received):
    with StopSignal() as stop:
        with contextlib.suppress(StopRequested):  # as Python does in a finaliser
            os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(StopRequested):
            stop.begin()
    assert received == []


class Interrupts(BaseException):
    pass


@pytest.mark.parametrize("asked", [False, True])
def test_an_error_of_another_thread_is_raised_wherever_the_main_one_is(received, asked):
    with pytest.raises(Interrupts), StopSignal() as stop:
        stop.begin()
        if asked:  # a stop was asked for before
            os.kill(os.getpid(), signal.SIGTERM)
        threading.Timer(0.1, stop.fail, [Interrupts()]).start()
        time.sleep(30)
    assert received == [] and stop.requested is asked
    os.kill(os.getpid(), signal.SIGTERM)
    assert received == [signal.SIGTERM]


def test_after_a_run_sigterm_is_as_before_although_none_came(received):
    with StopSignal() as stop:
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    assert received == [signal.SIGTERM] and not stop.requested


def test_a_run_in_a_thread_leaves_signals_alone(received):
    def run() -> None:
        with StopSignal() as stop:
            assert not stop.fail(Interrupts())
            os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert received == [signal.SIGTERM]
