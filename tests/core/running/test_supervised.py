"""What a run tells its supervisor."""

from __future__ import annotations

import os

import pytest

from hybridflow.core.running import supervised


@pytest.fixture
def pipe(monkeypatch):
    """The end at which a supervisor reads."""
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    monkeypatch.setenv(supervised.VARIABLE, str(writer))
    for state in ("_pipe", "_again", "_lost", "_stopping"):
        monkeypatch.setattr(supervised, state, getattr(supervised, state))
    supervised.begin()
    yield reader
    for end in (reader, writer):
        os.close(end)


def test_nothing_is_told_without_a_supervisor(monkeypatch):
    monkeypatch.delenv(supervised.VARIABLE, raising=False)
    monkeypatch.setattr(supervised, "_pipe", None)
    supervised.begin()
    supervised.tell("begun")


def test_messages_are_lines_and_the_pipe_is_not_for_other_processes(pipe):
    assert supervised.VARIABLE not in os.environ
    supervised.tell("begun")
    supervised.tell("kept step 40 of grpo")
    assert os.read(pipe, 100) == b"begun\nkept step 40 of grpo\n"
    assert not os.get_inheritable(supervised._pipe)


def test_a_supervisor_that_does_not_read_holds_up_nothing(pipe):
    for _ in range(10_000):
        supervised.tell("within 120")
    supervised.tell("begun")


def test_a_supervisor_that_is_gone_is_noticed_and_told_nothing_more(pipe):
    assert not supervised.lost()
    # In the place of the end at which it reads.
    os.dup2(os.open(os.devnull, os.O_RDONLY), pipe)
    supervised.tell("begun")
    assert supervised.lost()
    supervised.tell("begun")


def test_a_run_knows_whether_its_supervisor_has_begun_it_before(pipe, monkeypatch):
    assert not supervised.again()
    monkeypatch.setenv(supervised.VARIABLE, f"{os.dup(pipe)} again")
    supervised.begin()
    assert supervised.again()
    os.close(supervised._pipe)


def test_it_is_known_that_a_run_has_taken_sigterm_until_the_next_one_begins(pipe):
    assert not supervised.stopping()
    supervised.tell("stopping")
    assert supervised.stopping()
    supervised.begin()
    assert not supervised.stopping()
