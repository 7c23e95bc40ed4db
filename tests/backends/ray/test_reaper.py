"""What a local Ray leaves is found and ended, and nothing else is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from hybridflow.backends.ray import reaper


@contextmanager
def sleeping(mark, command="sleep"):
    """A process of the Ray whose ranks' folder is `mark`, or of none."""
    environment = {} if mark is None else {reaper.MARK: str(mark)}
    process = subprocess.Popen([command, "60"], executable="/bin/sleep", env=environment)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_the_processes_of_one_ray_are_told_from_others_and_from_ended_ones(tmp_path):
    folder = str(tmp_path / "mine")
    with sleeping(folder) as mine, sleeping(folder + "-too"), sleeping(None):
        assert set(reaper.remaining(folder, {})) == {mine.pid}
        mine.kill()
        # It has ended, though nobody has waited for it.
        os.waitid(os.P_PID, mine.pid, os.WEXITED | os.WNOWAIT)
        assert reaper.remaining(folder, {}) == {}


def test_a_process_without_the_mark_is_known_by_its_parent_and_remembered(tmp_path):
    script = "sleep 60 & unset HYBRIDFLOW_SCRATCH; sleep 60 & echo $!; wait"
    parent = subprocess.Popen(
        ["/bin/sh", "-c", script], env={reaper.MARK: str(tmp_path)}, stdout=subprocess.PIPE
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    known = reaper.remaining(str(tmp_path), {})
    assert child in known and len(known) == 3 and not reaper.marked(child, str(tmp_path))
    parent.kill()
    parent.wait()
    assert child not in reaper.remaining(str(tmp_path), {child: "of another start"})
    left = reaper.remaining(str(tmp_path), known)
    assert child in left and len(left) == 2
    for pid in left:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGKILL])
def test_rays_own_processes_are_asked_to_end_and_what_they_started_is_waited_for(
    monkeypatch, tmp_path, sent
):
    monkeypatch.setattr(reaper, "GRACE_S", 0.5)
    with (
        sleeping(tmp_path, "ray::HostActor") as rank,
        sleeping(tmp_path, "/lib/ray/core/raylet") as raylet,
        sleeping(tmp_path, "/x-ray/engine") as engine,
    ):
        over = threading.Thread(target=reaper.end, args=(str(tmp_path), {}, sent))
        over.start()
        assert rank.wait(0.4) == raylet.wait(0.4) == -sent
        assert engine.wait(10) == -signal.SIGKILL
        over.join()


@pytest.mark.parametrize("last_words", [b"", reaper.BROKEN])
def test_the_ray_of_an_ended_controller_is_ended_after_a_time_of_grace(
    monkeypatch, tmp_path, last_words
):
    folder = tmp_path / "ranks"
    folder.mkdir()
    (folder / "store").touch()
    monkeypatch.setattr(reaper, "GRACE_S", 0.3)
    reading, writing = os.pipe()
    with (
        os.fdopen(reading) as stdin,
        ThreadPoolExecutor(1) as pool,
        sleeping(folder) as ray,
        sleeping(folder, "ray::HostActor") as rank,
        sleeping(tmp_path) as other,
    ):
        monkeypatch.setattr(sys, "stdin", stdin)
        os.write(writing, last_words)
        over = pool.submit(reaper.main, str(folder))
        time.sleep(0.1)
        assert not over.done() and ray.poll() is None
        began = time.monotonic()
        os.close(writing)  # the controller has ended
        over.result()
        assert time.monotonic() - began >= 0.3
        assert ray.wait(10) == -signal.SIGKILL and other.poll() is None
        assert rank.wait(10) == -(signal.SIGKILL if last_words else signal.SIGTERM)
    assert not folder.exists()


def test_a_folder_is_removed_although_something_still_writes_into_it(tmp_path):
    folder = tmp_path / "ranks"
    (folder / "engine").mkdir(parents=True)
    for number in range(100):
        (folder / "engine" / str(number)).touch()

    def write():
        try:
            for number in range(200):
                (folder / "engine" / f"late-{number}").touch()
        except FileNotFoundError:
            pass

    thread = threading.Thread(target=write)
    thread.start()
    reaper.remove(str(folder))
    thread.join()
    assert not folder.exists()
