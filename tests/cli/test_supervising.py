"""When a supervisor starts a run again, how, and when it gives up; the runs are small programs."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import pytest
from helpers.waiting import eventually

from hybridflow.cli import supervising

HEAD = """
import os, signal, sys, time
from pathlib import Path
from hybridflow.core.running import supervised

supervised.begin()
with open("starts", "a") as file:
    print(*sys.argv[1:], file=file)
start = len(Path("starts").read_text().splitlines())
tell = supervised.tell


def die():
    os.kill(os.getpid(), signal.SIGKILL)


"""


@pytest.fixture
def supervise(tmp_path, monkeypatch):
    """supervise(program, *first) -> (status, what the supervisor said, the arguments of each start)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(supervising, "LOOK_S", 0.05)
    monkeypatch.setattr(supervising, "LONGEST_PAUSE_S", 0.05)

    def run(program: str, *first: str) -> tuple[int, list[str], list[str]]:
        Path("program.py").write_text(HEAD + program)
        said: list[str] = []
        status = supervising.supervise([sys.executable, "program.py"], first, said.append)
        return status, said, Path("starts").read_text().split("\n")[:-1]

    return run


@pytest.mark.parametrize("status", [0, 1, 2, 99, 130])
def test_what_ends_by_itself_is_not_started_again(supervise, status):
    assert supervise(f"sys.exit({status})") == (status, [], [""])


def test_what_has_died_goes_on_from_its_checkpoint_and_begins_as_at_first_before_that(supervise):
    program = """
if start == 1:
    die()
tell("begun")
if start == 2:
    tell("kept step 20 of grpo")
    die()
if start == 3:
    sys.exit(75)
"""
    status, said, starts = supervise(program, "--overwrite")
    assert status == 0
    assert starts == ["--overwrite", "--overwrite", "--resume", "--resume"]
    assert said == [
        "supervisor: the run has ended by SIGKILL; start 2, as at first",
        "supervisor: the run has ended by SIGKILL; start 3, from the checkpoint of step 20 of grpo",
        "supervisor: the run has ended, as something in it has died or stood still; start 4, from the "
        "checkpoint of step 20 of grpo",
    ]


def test_it_is_given_up_after_five_starts_in_a_row_without_a_checkpoint(supervise):
    program = """
tell("begun")
if start == 3:
    tell("kept step 2")
die()
"""
    status, said, starts = supervise(program)
    assert (status, len(starts)) == (75, 8)
    assert said[-1].endswith("it is given up after 5 starts without a checkpoint")
    assert "start 2, from its newest checkpoint" in said[0]


def test_one_that_makes_no_sign_in_time_is_ended_and_started_again(supervise):
    program = """
if start == 1:
    tell("within 30")
    tell("within 0.3")
    time.sleep(60)
tell("within 0.3")
tell("within inf")
time.sleep(0.6)
"""
    status, said, _ = supervise(program)
    assert status == 0 and len(said) == 2
    assert said[0].endswith("has made no sign for 0 s; it is ended")


@pytest.mark.parametrize("own", [False, True])
def test_sigterm_reaches_the_run_once_whether_it_got_it_itself_or_not(supervise, monkeypatch, own):
    monkeypatch.setattr(supervising, "HEARD_S", 0.3)
    program = f"""
def on_term(number, frame):
    with open("terms", "a") as file:
        print(number, file=file)
    tell("stopping")

signal.signal(signal.SIGTERM, on_term)
Path("ready").touch()
if {own}:
    os.kill(os.getpid(), signal.SIGTERM)
deadline = time.monotonic() + 1.5
while time.monotonic() < deadline:
    time.sleep(0.05)
sys.exit(99)
"""

    def send() -> None:
        eventually(lambda: Path("ready").exists())
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=send).start()
    status, said, starts = supervise(program)
    assert (status, said, starts) == (99, [], [""])
    assert len(Path("terms").read_text().splitlines()) == 1


def test_a_run_that_dies_when_it_is_told_to_stop_is_to_be_queued_again(supervise):
    program = """
if start == 1:
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(60)
"""
    assert supervise(program) == (99, [], [""])  # SIGTERM ends it, as nothing takes it yet


@pytest.mark.parametrize(("number", "status"), [("SIGTERM", 99), ("SIGINT", 130)])
def test_a_run_that_is_killed_as_it_is_to_end_is_not_started_again(supervise, number, status):
    program = f"""
os.kill(os.getppid(), signal.{number})
die()
"""
    assert supervise(program) == (status, [], [""])


def test_what_is_ignored_stays_ignored_and_a_hangup_is_a_sigterm(supervise):
    program = """
signal.signal(signal.SIGTERM, lambda *_: sys.exit(99))
os.kill(os.getppid(), signal.SIGHUP)
time.sleep(3)
sys.exit(1)
"""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        assert supervise(program)[0] == 1
    finally:
        signal.signal(signal.SIGHUP, before)
    assert supervise(program)[0] == 99


def test_a_later_start_knows_that_the_folder_is_this_supervisors(supervise):
    program = """
if start == 1:
    assert not supervised.again()
    die()
assert supervised.again()
"""
    assert supervise(program)[0] == 0


def test_a_signal_between_two_starts_ends_it_with_the_status_that_schedulers_queue_again(
    supervise, monkeypatch
):
    monkeypatch.setattr(supervising, "LONGEST_PAUSE_S", 60.0)
    monkeypatch.setattr(
        supervising, "_pause", lambda seconds, arrived: arrived.append(signal.SIGTERM)
    )
    status, _, starts = supervise("die()")
    assert (status, starts) == (99, [""])
