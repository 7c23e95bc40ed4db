"""A later rank's connection: answers, the engine's errors, silence, and the process's end."""

from __future__ import annotations

import secrets
import threading
from multiprocessing.connection import Listener

import pytest

from hybridflow.core.errors import HybridFlowError
from hybridflow.kit.hosting.follower import Follower
from hybridflow.kit.hosting.process import EngineDied


@pytest.fixture
def door():
    return f"\0hybridflow-test-{secrets.token_hex(8)}", b"key"


def answering(door, *answers) -> threading.Thread:
    """Serve one connection: an answer for each message, then the end."""
    listener = Listener(door[0], "AF_UNIX", authkey=door[1])

    def serve() -> None:
        with listener, listener.accept() as connection:
            for answer in answers:
                connection.recv()
                connection.send(("answer", answer))

    thread = threading.Thread(target=serve)
    thread.start()
    return thread


def test_answers_and_errors_come_back_and_the_end_is_a_death(door):
    serving = answering(door, 7, HybridFlowError("no such parameter"))
    follower = Follower(*door)
    assert follower.ask("load", 1, timeout_s=10.0) == 7
    with pytest.raises(HybridFlowError, match="no such parameter"):
        follower.ask("load", 2, timeout_s=10.0)
    serving.join()
    with pytest.raises(EngineDied, match="is gone"):
        follower.ask("load", 3, timeout_s=10.0)
    follower.close()
    follower.close()


def test_silence_is_a_death_after_a_while(door):
    waiting = threading.Event()
    listener = Listener(door[0], "AF_UNIX", authkey=door[1])

    def serve() -> None:
        with listener, listener.accept():
            waiting.wait(10.0)

    thread = threading.Thread(target=serve)
    thread.start()
    follower = Follower(*door)
    with pytest.raises(EngineDied, match="no answer to load within 0 s"):
        follower.ask("load", timeout_s=0.1)
    waiting.set()
    thread.join()


def test_nobody_at_the_door_is_a_death(door):
    with pytest.raises(EngineDied, match="is gone"):
        Follower(*door)
