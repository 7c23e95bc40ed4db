"""The process that runs programs, and what they are given."""

from __future__ import annotations

import os
import signal
import socket

import pytest
from helpers.programs import ends, run

from hybridflow.kit.sandbox import process
from hybridflow.kit.sandbox.process import Limits, ProgramOutcome, SandboxError, give_back, take


def test_a_program_was_good_if_it_ended_by_itself_with_status_0():
    assert ProgramOutcome("ended", 0, "", "").good
    assert not ProgramOutcome("ended", 1, "", "").good
    assert not ProgramOutcome("time", 0, "", "").good
    assert not ProgramOutcome("output", 0, "", "").good


def test_a_program_cannot_change_its_input():
    found = run(
        """
        import os
        for action in (
            lambda: os.write(0, b"x"), lambda: os.truncate(0, 0), lambda: os.truncate(0, 10**6),
        ):
            try:
                action()
                print("changed")
            except OSError as error:
                print(error.errno)
        print(input())
        """,
        "given",
    )
    assert found.output == "1\n1\n1\ngiven\n", found


@pytest.fixture
def apart(monkeypatch):
    """The sandboxes of a test alone."""
    monkeypatch.setattr(process, "_idle", [])
    monkeypatch.setattr(process, "_starter", None)
    yield
    process.close_idle()


def test_no_more_processes_wait_than_may(apart, monkeypatch):
    monkeypatch.setattr(process, "MOST_IDLE", 2)
    jails = [take() for _ in range(3)]
    for jail in jails:
        give_back(jail)
    assert process._idle == jails[1:] and ends(jails[0].pid)
    assert take() is jails[2]
    jails[2].close()
    process.close_idle()
    assert all(ends(jail.pid) for jail in jails)


def test_a_starter_that_was_killed_is_an_error_and_the_next_program_has_a_new_one(apart):
    jail = take()
    process._starter.process.kill()
    process._starter.process.wait()
    # What it has started ends with it.
    assert ends(jail.pid)
    jail.close()
    with pytest.raises(SandboxError, match=r"has ended|Broken pipe"):
        take()
    assert run("print(7)").output == "7\n"


def test_idle_ones_that_were_ended_are_passed_over(apart):
    for jail in [take() for _ in range(3)]:
        give_back(jail)
    [*ended, last] = process._idle
    for jail in (ended[0], last):
        os.kill(jail.pid, signal.SIGKILL)
        assert ends(jail.pid)
    assert run("print(7)").output == "7\n"
    assert process._idle == [ended[0], ended[1]]


def test_where_no_process_can_start_the_others_go_on(apart):
    assert run("pass").good
    [idle] = process._idle
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    starter = process._starter
    with ours, theirs, starter.channel:
        starter.channel = ours
        theirs.send(b"-1")
        first = take()
        with pytest.raises(SandboxError, match="lets no more processes start"):
            take()
        assert first is idle and process._starter is starter and starter.process.poll() is None
        give_back(first)
    starter.process.wait(10)


def test_a_failure_leaves_no_descriptor(apart):
    jail = take()
    jail.begin({}, door=False)
    before = os.listdir("/proc/self/fd")
    for program, given in (({"program": object()}, ""), ({}, object())):
        with pytest.raises((TypeError, AttributeError)):
            jail.run(program, given, Limits())
    assert os.listdir("/proc/self/fd") == before
    jail.close()


def test_a_forked_process_has_sandboxes_of_its_own():
    assert run("pass").good
    idle = [jail.pid for jail in process._idle]
    child = os.fork()
    if child == 0:
        good = process._idle == [] and run("pass").good and process._idle[0].pid not in idle
        process.close_idle()
        os._exit(0 if good else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert [jail.pid for jail in process._idle] == idle and run("pass").good
