"""The process that runs programs, and what they are given."""

from __future__ import annotations

from helpers.programs import run

from hybridflow.kit.sandbox import process
from hybridflow.kit.sandbox.process import ProgramOutcome, give_back, take


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


def test_no_more_processes_wait_than_may(monkeypatch):
    monkeypatch.setattr(process, "_idle", [])
    monkeypatch.setattr(process, "MOST_IDLE", 2)
    jails = [take() for _ in range(3)]
    for jail in jails:
        give_back(jail)
    assert process._idle == jails[1:] and jails[0].process.poll() is not None
    assert take() is jails[2]
    jails[2].close()
    process.close_idle()
    assert all(jail.process.poll() is not None for jail in jails)
