"""What a local Ray leaves is found and ended, and nothing else is."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import termios
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from hybridflow.backends.ray import reaper

CONTROLLER = """
import subprocess
names = ["/ray/raylet", "something else"]
quiet = {"executable": "/bin/sleep", "stdout": subprocess.DEVNULL}
started = [subprocess.Popen([name, "60"], **quiet) for name in names]
print(*(process.pid for process in started), flush=True)
input()
"""


@pytest.fixture
def controller():
    """(its process, its raylet, its other child): sleeping processes under these names."""
    command = [sys.executable, "-I", "-S", "-c", CONTROLLER]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    raylet, other = map(int, process.stdout.readline().split())
    yield process, raylet, other
    for child in (raylet, other):
        if runs(child):
            os.kill(child, signal.SIGKILL)
    process.kill()
    process.communicate()


def runs(pid):
    return any(pid == each for group in reaper.children().values() for each, _, _ in group)


def test_rays_processes_are_told_from_others_of_the_controller():
    own = {pid for pid, _, _ in reaper.children()[os.getppid()]}
    assert os.getpid() in own
    child = subprocess.Popen(["raylet of no folder", "60"], executable="/bin/sleep")
    try:
        assert child.pid in {pid for pid, _, _ in reaper.children()[os.getpid()]}
        assert child.pid not in {pid for pid, _ in reaper.of_ray(os.getpid())}
    finally:
        child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not runs(child.pid)  # it has ended, though nobody has waited for it
    child.wait()


def test_a_process_that_has_the_number_of_an_ended_one_is_another(controller):
    _, raylet, _ = controller
    ((pid, began),) = reaper.of_ray(controller[0].pid)
    assert pid == raylet
    assert reaper.living({(pid, began), (pid, "0")}) == {(pid, began)}


def test_the_ray_of_a_killed_controller_is_ended_after_a_time_of_grace(
    controller, monkeypatch, tmp_path
):
    folder = tmp_path / "ranks"
    folder.mkdir()
    (folder / "store").touch()
    process, raylet, other = controller
    reading, writing = os.pipe()
    monkeypatch.setattr(reaper, "GRACE_S", 0.3)
    with os.fdopen(reading) as stdin, ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(sys, "stdin", stdin)
        over = pool.submit(reaper.main, process.pid, str(folder))
        os.write(writing, b"x")
        while waiting(reading) and not over.done():  # it reads after it has looked
            time.sleep(0.01)
        process.kill()
        process.wait()
        began = time.monotonic()
        os.close(writing)
        over.result()
    assert time.monotonic() - began >= 0.3
    assert not runs(raylet)
    assert runs(other)
    assert not folder.exists()


def waiting(pipe):
    """Bytes that nobody has read yet."""
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)
