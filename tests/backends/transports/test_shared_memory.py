"""Files in /dev/shm outlive their process: the next one removes them, and only those."""

import os
import signal
import subprocess
import sys

import torch

from hybridflow.backends.transports.shared_memory import FOLDER, PREFIX, SharedMemory
from hybridflow.core.contracts.transport import Link

SENDER = """
import torch
from hybridflow.backends.transports.shared_memory import SharedMemory
from hybridflow.core.contracts.transport import Link
box = SharedMemory(Link(0, [0, 1], torch.device("cpu"), nodes={0: "here", 1: "here"}))
print(box.post({1: torch.arange(100, dtype=torch.uint8)})[1][0], flush=True)
input()
"""


def mailbox() -> SharedMemory:
    return SharedMemory(Link(1, [0, 1], torch.device("cpu"), nodes={0: "here", 1: "here"}))


def test_what_a_killed_sender_left_is_removed_by_the_next_process_and_nothing_else():
    sender = subprocess.Popen(
        [sys.executable, "-c", SENDER], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )
    try:
        path = sender.stdout.readline().strip()
        ours = mailbox()
        own = ours.post({0: torch.zeros(10, dtype=torch.uint8)})[0]
        mailbox()
        assert os.path.exists(path) and os.path.exists(own[0])  # both live
        assert ours.get((path, None), 100).tolist() == list(range(100))
        sender.send_signal(signal.SIGKILL)
        sender.wait()
        mailbox()
        assert not os.path.exists(path) and os.path.exists(own[0])
        ours.forget()
        assert not os.path.exists(own[0])
    finally:
        sender.kill()
        sender.communicate()
    assert not [p for p in FOLDER.glob(f"{PREFIX}*") if p.name.startswith(os.path.basename(path))]


def test_a_message_that_does_not_fit_is_an_error_and_leaves_nothing(monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    before = sorted(FOLDER.iterdir())
    try:
        mailbox().post({0: torch.zeros(10, dtype=torch.uint8)})
    except OSError as error:
        assert error.errno == 28
    else:
        raise AssertionError("a full /dev/shm went unnoticed")
    assert sorted(FOLDER.iterdir()) == before
