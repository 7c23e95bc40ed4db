"""What a run tells its supervisor."""

from __future__ import annotations

import os
import signal

import pytest

from hybridflow.core.running import supervised


@pytest.fixture
def pipe(monkeypatch):
    """The end at which a supervisor reads."""
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    monkeypatch.setenv(supervised.VARIABLE, str(writer))
    monkeypatch.setattr(supervised, "_pipe", None)
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


def test_a_run_that_has_lost_its_supervisor_is_asked_to_stop_once(pipe):
    arrived = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: arrived.append(number))
    try:
        reader = os.dup(pipe)
        os.close(reader)
        os.dup2(os.open(os.devnull, os.O_RDONLY), pipe)  # closes the reading end
        supervised.tell("begun")
        supervised.tell("begun")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert arrived == [signal.SIGTERM]
