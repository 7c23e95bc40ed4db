"""TransportConformance finds planted faults."""

from __future__ import annotations

import fcntl
import os
import secrets
import sys

import pytest
from helpers.paths import TESTS, matrix

from hybridflow.backends.transports.shared_memory import FOLDER, PREFIX
from hybridflow.kit.testing.transports import CASES, TransportConformance


@pytest.fixture
def moved(monkeypatch, tmp_path):
    """What the ranks, which import the transport by name, say of it."""
    path = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", f"{TESTS}{os.pathsep}{path}")
    monkeypatch.setattr(sys, "path", [str(TESTS), *sys.path])

    class Kit(TransportConformance):
        folder_setting = "folder"

    run = TransportConformance.moved.__wrapped__
    return lambda transport: run(Kit(), f"helpers.transport_faults:{transport}", tmp_path)


def check(found):
    kit = TransportConformance()
    kit.test_every_layout_arrives_bit_for_bit_again_and_again_and_nothing_is_left_behind(found)


def told(found, says):
    with pytest.raises(AssertionError, match=says):
        check(found)


def repair(found):
    """As if all had arrived right."""
    for answer in found:
        answer.update({case: [] for case in CASES})


def test_each_fault_of_a_transport_is_told_once_those_before_it_are_gone(moved):
    found = moved("WrongOnDisk")
    told(found, "cannot serve one node: not today")
    for answer in found:
        answer["problem"] = None
    told(found, "gather, sync 0, rank 0: .* arrived wrong")
    repair(found)
    told(found, "left in the folder or in /dev/shm: .*weights-")
    for answer in found:
        answer["left"] = []
    check(found)


@pytest.fixture
def of_other_runs():
    """A message of a run that was killed, and one of a run that goes on."""
    paths = [FOLDER / f"{PREFIX}{secrets.token_hex(8)}" for _ in range(2)]
    for path in paths:
        path.touch()
    with paths[1].open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield {path.name for path in paths}
    for path in paths:
        path.unlink(missing_ok=True)


@matrix
def test_messages_that_share_a_buffer_or_stay_in_memory_are_noticed(moved, of_other_runs):
    found = moved("WrongInMemory")
    left = set(found[0]["left"])
    for name in left - of_other_runs:
        (FOLDER / name).unlink(missing_ok=True)
    told(found, "arrived wrong")
    repair(found)
    told(found, f"left in the folder or in /dev/shm: .*{PREFIX}")
    assert left and not left & of_other_runs
